//! The time limit of a command, in minutes.

/// Parses a number of minutes.
pub fn parse(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e5 => Ok(minutes),
        Ok(_) => Err("expected more than 0 and at most 100000 minutes".into()),
        Err(error) => Err(error.to_string()),
    }
}
