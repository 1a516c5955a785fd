"""Predictions compared with measurements.

`verdicts` compares values of the same points and judges them by bounds, `intervals` says how far the uncertainty of a
calibration moves a prediction, `page` writes both as one HTML file.  The experiment ``validate`` drives them: it
predicts and seals the predictions before anything is measured.
"""
