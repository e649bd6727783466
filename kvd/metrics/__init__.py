"""What the daemon tells a monitoring system."""
