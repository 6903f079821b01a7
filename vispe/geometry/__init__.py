"""Two-view geometry in numpy float64: homographies, epipolar geometry, poses, and their robust estimation."""
