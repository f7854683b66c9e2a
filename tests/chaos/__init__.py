"""Real processes, broken on purpose at named phases. Run alone: python -m tests.chaos.matrix"""
