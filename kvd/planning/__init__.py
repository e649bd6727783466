"""What sessions take of a machine, and what a machine gives: arithmetic on a model's sizes and on measured figures."""
