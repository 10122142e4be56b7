"""The trainer. Start reading at train.py, one folder up; nothing is imported here, so that each part costs only what it needs."""
