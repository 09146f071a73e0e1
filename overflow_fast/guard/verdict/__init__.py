"""From a step's bad frames to what they mean."""
