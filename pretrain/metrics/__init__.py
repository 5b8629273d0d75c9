"""What a step cost and what it reached: FLOPs, hardware peaks, the meter, and where the lines go."""
