"""The bench that runs one case: watched calls, judged results, failures with their diagnoses."""
