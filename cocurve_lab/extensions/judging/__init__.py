"""What a plan does to perplexity, text and answers, and why its KL is not what H predicts."""
