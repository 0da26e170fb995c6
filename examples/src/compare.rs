//! `burn-megatron compare`.

use std::process::ExitCode;

use burn_megatron::train::metrics::{Record, read_metrics};
use burn_megatron::train::plot::{Comparison, LossCurve};
use burn_megatron::train::run_folder::RunFolder;

use crate::cli::CompareArgs;
use crate::recipe::Error;

/// A run, and what is compared of it.
struct Run {
    name: String,
    records: Vec<Record>,
    /// The step and the loss of its last evaluation.
    held_out: (usize, f64),
}

/// Prints a table of the last held-out losses, and draws the curves.
pub fn run(args: &CompareArgs) -> Result<ExitCode, Error> {
    let runs = args.runs.iter().map(|path| {
        let folder = RunFolder::open(path)?;
        let records = read_metrics(&folder.metrics())?;
        let name = folder
            .path()
            .file_name()
            .unwrap_or(folder.path().as_os_str());
        let held_out = |record: &Record| match record {
            Record::HeldOut(metrics) => Some((metrics.step, metrics.loss)),
            Record::Step(_) => None,
        };
        let held_out = records.iter().rev().find_map(held_out);
        Ok(Run {
            name: name.to_string_lossy().into_owned(),
            held_out: held_out
                .ok_or_else(|| format!("{} has no held-out loss yet", path.display()))?,
            records,
        })
    });
    let runs = runs.collect::<Result<Vec<Run>, Error>>()?;
    println!("{}", table(&runs));
    if let Some(svg) = &args.svg {
        let curve = |run: &Run| LossCurve::from_records(&run.name, &run.records);
        let empty = Comparison::new(&args.title);
        let picture = runs.iter().map(curve).fold(empty, Comparison::with);
        picture.write_svg(svg)?;
        println!("\nwritten to {}", svg.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// A line for each run, with its distance from the first.
fn table(runs: &[Run]) -> String {
    let width = runs.iter().map(|run| run.name.chars().count()).max();
    let width = width.unwrap_or(0).max("run".len());
    let first = runs.first().map_or(f64::NAN, |run| run.held_out.1);
    let mut lines = vec![format!(
        "{:<width$}  steps  held-out loss  difference",
        "run"
    )];
    for (i, run) in runs.iter().enumerate() {
        let (step, loss) = run.held_out;
        let difference = match i {
            0 => "-".into(),
            _ => format!("{:+.2} %", 100.0 * (loss / first - 1.0)),
        };
        lines.push(format!(
            "{:<width$}  {step:>5}  {loss:>13.4}  {difference:>10}",
            run.name
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_compared_with_the_first() {
        let run = |name: &str, loss| Run {
            name: name.into(),
            records: vec![],
            held_out: (800, loss),
        };
        let text = "run        steps  held-out loss  difference\n\
                    bf16         800         1.5000           -\n\
                    blockwise    800         1.4850     -1.00 %";
        assert_eq!(table(&[run("bf16", 1.5), run("blockwise", 1.485)]), text);
    }
}
