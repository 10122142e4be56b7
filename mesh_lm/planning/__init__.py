"""What a run would do on GPUs that are not here: `train.py --plan`."""
