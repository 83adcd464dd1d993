"""Make the finalists' files, score and time them in the deployment runtime, compare them and report the front."""
