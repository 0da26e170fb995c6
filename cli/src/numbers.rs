//! Numbers in text: thousands separators, plural nouns, and numbers of flags.

use indicatif::HumanCount;

/// Formats a number with thousands separators: `1,024`.
pub fn grouped(number: usize) -> String {
    HumanCount(number as u64).to_string()
}

/// Formats a number with its noun: `1 step`, `1,024 steps`.
pub fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", grouped(number))
}

/// Parses a number of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("expected at least 1".into()),
        Ok(samples) => Ok(samples),
        Err(error) => Err(format!("{error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nouns_are_in_the_plural_but_for_one() {
        let of = |number| count(number, "step");
        assert_eq!(
            [0, 1, 2, 1024].map(of),
            ["0 steps", "1 step", "2 steps", "1,024 steps"]
        );
    }
}
