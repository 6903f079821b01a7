"""Speed as ratios: ours against the peer, in turns in one process. Not run by pytest; ``make bench``."""
