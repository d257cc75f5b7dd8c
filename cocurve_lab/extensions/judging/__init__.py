"""What a plan does to text and answers, and why its KL is not what H predicts."""
