"""``python -m vispe`` is the command ``vispe``."""

from vispe.cli import main

raise SystemExit(main())
