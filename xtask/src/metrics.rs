//! Reads the metrics of a run of `pretrain`.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// Returns the losses of a run, from its folder.
pub fn losses_in(run_dir: &Path) -> Result<Vec<f64>, String> {
    let metrics = run_dir.join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).map_err(|e| format!("{}: {e}", metrics.display()))?;
    losses(&text)
}

/// Returns the losses of the step records, in order. A loss that is not finite becomes NaN.
pub fn losses(metrics: &str) -> Result<Vec<f64>, String> {
    let mut losses = Vec::new();
    for (number, line) in (1..).zip(metrics.lines()) {
        let record: Value = serde_json::from_str(line)
            .map_err(|error| format!("metrics.jsonl:{number}: {error}"))?;
        if record["kind"] == "step" {
            losses.push(record["loss"].as_f64().unwrap_or(f64::NAN));
        }
    }
    Ok(losses)
}

/// Checks that a run has all steps, that its losses are finite, and that the last loss is lower than the first.
pub fn check_losses(losses: &[f64], steps: usize) -> Result<(), String> {
    if losses.len() != steps {
        return Err(format!(
            "{} step records, where {steps} steps were asked for",
            losses.len()
        ));
    }
    if let Some(step) = losses.iter().position(|loss| !loss.is_finite()) {
        return Err(format!(
            "the loss of step record {} is {}",
            step + 1,
            losses[step]
        ));
    }
    let (first, last) = (losses[0], losses[steps - 1]);
    if last < first {
        Ok(())
    } else {
        Err(format!("the loss went from {first} to {last}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: usize = 8;

    #[test]
    fn held_out_records_are_told_from_steps() {
        let metrics = "\
{\"kind\":\"step\",\"step\":0,\"loss\":5.5}
{\"kind\":\"held_out\",\"step\":1,\"loss\":5.4}
{\"kind\":\"step\",\"step\":1,\"loss\":5.0}
";
        assert_eq!(losses(metrics), Ok(vec![5.5, 5.0]));
    }

    #[test]
    fn a_loss_that_is_no_number_is_found() {
        let read = losses("{\"kind\":\"step\",\"loss\":\"NaN\"}").unwrap();
        assert!(read[0].is_nan());
        let error = losses("{}\n{\"kind\":").unwrap_err();
        assert!(error.starts_with("metrics.jsonl:2: "), "{error}");
    }

    #[test]
    fn a_run_must_be_whole_finite_and_falling() {
        let falling: Vec<f64> = (0..STEPS).map(|step| 6.0 - 0.1 * step as f64).collect();
        assert_eq!(check_losses(&falling, STEPS), Ok(()));
        assert!(
            check_losses(&falling[1..], STEPS)
                .unwrap_err()
                .starts_with("7 step records")
        );
        let mut broken = falling.clone();
        broken[3] = f64::NAN;
        assert_eq!(
            check_losses(&broken, STEPS).unwrap_err(),
            "the loss of step record 4 is NaN"
        );
        let rising: Vec<f64> = falling.into_iter().rev().collect();
        assert!(
            check_losses(&rising, STEPS)
                .unwrap_err()
                .starts_with("the loss went from")
        );
        assert!(check_losses(&[5.0; STEPS], STEPS).is_err());
    }
}
