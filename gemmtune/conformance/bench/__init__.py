"""The bench on which one case is run: watched calls, judged results, failures with their diagnoses."""
