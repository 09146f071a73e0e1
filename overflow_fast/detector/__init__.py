"""From a model's calls to frames: hooks, steps, compiled code, scans."""
