"""What the command ``vispe`` can do, a file a family of commands: their options, and below them what runs."""
