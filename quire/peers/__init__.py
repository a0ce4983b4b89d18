"""Pages between engines: a prefill server computes the pages of a prompt, a decode server goes on from there."""
