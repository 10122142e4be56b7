"""What a run would do on GPUs that you do not have: `train.py --plan`."""
