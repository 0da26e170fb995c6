//! Implements `burn-megatron compare`.

use std::iter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_megatron::regular_file;
use burn_megatron::text_table::Table;
use burn_megatron_train::metrics::{MetricsRecord, oldest_version, read_metrics};
use burn_megatron_train::plot::{LossComparison, LossCurve};
use burn_megatron_train::run_folder::RunFolder;
use clap::Args;

use crate::error::Error;
use crate::{recipe, terminal};

/// Flags of `compare`.
#[derive(Args)]
pub struct CompareArgs {
    /// Run folders. The first run is the reference, with which all other runs are compared.
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Write the plot to this file.
    #[arg(long, value_name = "FILE.svg")]
    pub svg: Option<PathBuf>,
    /// Title of the plot.
    #[arg(long, value_name = "TEXT", default_value = "Loss")]
    pub title: String,
}

/// A run to compare.
struct ComparedRun {
    name: String,
    records: Vec<MetricsRecord>,
    /// The step of the last evaluation, or the last step if there is no evaluation.
    steps: usize,
    /// The loss of the last evaluation.
    held_out: Option<f64>,
    /// The terms of the loss in addition to the cross-entropy. Set only for metrics of version 1, whose loss includes
    /// these terms.
    minimised: Option<Vec<String>>,
}

impl ComparedRun {
    /// Reads the run in a folder.
    fn read(path: &Path) -> Result<Self, Error> {
        let folder = RunFolder::open(path)?;
        let records = read_metrics(&folder.metrics())?;
        let name = folder
            .path()
            .file_name()
            .unwrap_or(folder.path().as_os_str());
        let held_out = |record: &MetricsRecord| match record {
            MetricsRecord::HeldOut(metrics) => Some((metrics.step, Some(metrics.loss))),
            _ => None,
        };
        let step = |record: &MetricsRecord| match record {
            MetricsRecord::Step(metrics) => Some((metrics.step, None)),
            _ => None,
        };
        let newest = || records.iter().rev();
        let found = newest()
            .find_map(held_out)
            .or_else(|| newest().find_map(step));
        let (steps, held_out) =
            found.ok_or_else(|| format!("{} has no step yet", path.display()))?;
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            steps,
            held_out,
            minimised: match oldest_version(&records) {
                1 => Some(terms(&folder)?),
                _ => None,
            },
            records,
        })
    }

    /// Returns the name in the plot, with the terms that the loss includes.
    fn title(&self) -> String {
        match self.minimised.as_deref() {
            None | Some([]) => self.name.clone(),
            Some(terms) => format!("{} (with {})", self.name, terms.join(" and ")),
        }
    }
}

/// Returns the loss terms that a run minimized in addition to the cross-entropy, from its configuration.
fn terms(folder: &RunFolder) -> Result<Vec<String>, Error> {
    let path = folder.config();
    let text = regular_file::read_text(&path, recipe::MAX_BYTES)
        .map_err(|error| format!("cannot read '{}': {error}", path.display()))?;
    // Do not parse it as a recipe: a recipe of an older version may have other keys.
    let config: toml::Table = toml::from_str(&text)
        .map_err(|error| format!("'{}' is not TOML: {error}", path.display()))?;
    let weight = |key: &str| {
        let weight = config.get("model")?.get(key)?;
        weight
            .as_float()
            .or(weight.as_integer().map(|weight| weight as f64))
    };
    let term = |(key, name)| match weight(key) {
        None | Some(0.0) => None,
        Some(weight) => Some(format!("{name} {weight}")),
    };
    let terms = [("label_smoothing", "label smoothing"), ("z_loss", "z-loss")];
    Ok(terms.into_iter().filter_map(term).collect())
}

/// Returns a note on the loss of a run whose metrics are of version 1.
fn note(run: &ComparedRun) -> Option<String> {
    let is = match &run.minimised.as_ref()?[..] {
        [] => "without label smoothing and z-loss, that is the cross-entropy".into(),
        terms => format!(
            "the cross-entropy with {}, which is not to be compared with the cross-entropy alone",
            terms.join(" and ")
        ),
    };
    Some(format!(
        "the metrics of {} have format version 1, in which the loss is the training objective: {is}",
        run.name
    ))
}

/// Prints a table of the last held-out losses and the loss curves. With `--svg`, also writes the plot to a file.
pub fn run(args: &CompareArgs) -> Result<ExitCode, Error> {
    let runs = args.runs.iter().map(|path| ComparedRun::read(path));
    let runs = runs.collect::<Result<Vec<ComparedRun>, Error>>()?;
    println!("{}", table(&runs));
    for note in runs.iter().filter_map(note) {
        println!("\n{note}");
    }
    let curve = |run: &ComparedRun| LossCurve::from_records(run.title(), &run.records);
    let empty = LossComparison::new(&args.title);
    let picture = runs.iter().map(curve).fold(empty, LossComparison::with);
    println!("\n{}", picture.terminal(terminal::columns()));
    if let Some(svg) = &args.svg {
        picture.write_svg(svg)?;
        println!("\nwritten to {}", svg.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a table with one line for each run and its difference from the first run.
fn table(runs: &[ComparedRun]) -> String {
    let first = runs.first().and_then(|run| run.held_out);
    let head = ["#", "run", "steps", "held-out loss", "difference"];
    let row = |(i, run): (usize, &ComparedRun)| {
        let loss = run.held_out.map(|loss| format!("{loss:.4}"));
        let difference = run.held_out.zip(first).filter(|_| i > 0);
        let difference =
            difference.map(|(loss, first)| format!("{:+.2} %", 100.0 * (loss / first - 1.0)));
        let or_none = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
        let (number, steps) = ((i + 1).to_string(), run.steps.to_string());
        vec![
            number,
            run.name.clone(),
            steps,
            or_none(loss),
            or_none(difference),
        ]
    };
    let rows = iter::once(head.map(String::from).to_vec());
    let rows = rows.chain(runs.iter().enumerate().map(row));
    Table::new(rows).with_left([0, 1]).fit(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_compared_with_the_first() {
        let run = |name: &str, loss| ComparedRun {
            name: name.into(),
            records: vec![],
            steps: 800,
            held_out: loss,
            minimised: None,
        };
        let text = "#  run        steps  held-out loss  difference\n\
                    1  bf16         800         1.5000           -\n\
                    2  blockwise    800         1.4850     -1.00 %\n\
                    3  none         800              -           -";
        let runs = [
            run("bf16", Some(1.5)),
            run("blockwise", Some(1.485)),
            run("none", None),
        ];
        assert_eq!(table(&runs), text);
    }
    const STEP: &str = r#"{"kind":"step","step":0,"loss":5.5,"bits_per_byte":8.0,"gradient_norm":1.0,"learning_rate":0.001,"tokens":8,"skipped":false}"#;
    const HELD_OUT: &str =
        r#"{"kind":"held_out","step":1,"loss":5.25,"bits_per_byte":7.5,"tokens":8}"#;

    /// Creates a run folder with these lines of metrics and this configuration.
    fn folder(at: &Path, name: &str, lines: &[&str], config: &str) -> PathBuf {
        let path = at.join(name);
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("config.toml"), config).unwrap();
        std::fs::write(path.join("metrics.jsonl"), lines.join("\n") + "\n").unwrap();
        path
    }

    #[test]
    fn of_an_old_run_it_is_said_what_its_loss_was() {
        let temp = tempfile::tempdir().unwrap();
        let version = r#"{"kind":"run","version":2}"#;
        let new = [version, STEP, HELD_OUT];
        let old = [STEP, HELD_OUT];
        // The state after this version resumes a run of an older version.
        let both = [STEP, version, HELD_OUT];
        let plain = "[model]\nlayers = 2\nan_old_setting = true\n";
        let with = "[model]\nlabel_smoothing = 0.1\nz_loss = 1e-4\n";
        let read = |name, lines: &[&str], config| {
            ComparedRun::read(&folder(temp.path(), name, lines, config)).unwrap()
        };
        let says = |run: &ComparedRun| note(run).unwrap_or_default();

        let run = read("new", &new, with);
        assert_eq!((says(&run), run.title()), (String::new(), "new".into()));
        let run = read("plain", &old, plain);
        insta::assert_snapshot!(
            says(&run),
            @"the metrics of plain have format version 1, in which the loss is the training objective: without \
              label smoothing and z-loss, that is the cross-entropy"
        );
        assert_eq!(run.title(), "plain");
        for (name, lines) in [("old", &old[..]), ("both", &both[..])] {
            let run = read(name, lines, with);
            let objective = format!(
                "the metrics of {name} have format version 1, in which the loss is the training objective: the \
                 cross-entropy with label smoothing 0.1 and z-loss 0.0001, which is not to be \
                 compared with the cross-entropy alone"
            );
            assert_eq!(says(&run), objective);
            assert_eq!(
                run.title(),
                format!("{name} (with label smoothing 0.1 and z-loss 0.0001)")
            );
            assert_eq!((run.steps, run.held_out), (1, Some(5.25)));
        }
        // A run without held-out data. Version 1 counts steps from 0.
        let step = STEP.replace("\"step\":0", "\"step\":7");
        let run = read("everything", &[version, &step], with);
        assert_eq!((run.steps, run.held_out), (8, None));
    }
}
