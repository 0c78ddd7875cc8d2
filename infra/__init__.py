"""What runs around the pipeline: the local Prefect server, the demo model's training."""
