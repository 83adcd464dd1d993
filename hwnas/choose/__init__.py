"""The command `hwnas choose`, which finds the cheapest network and deployment for a load at a service level."""
