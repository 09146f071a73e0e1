"""The page: flight records and incidents as one HTML file that needs nothing else."""
