//! Runs one case: a recipe in its layout, and the same recipe on one rank.

use std::fs;
use std::path::Path;

use super::compare;
use super::run::{End, Finding, Kind, Runner};
use crate::draw::Settings;

/// The end of a case.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// The results agree with one rank.
    Passed,
    /// The program refused the recipe with an error.
    Refused(String),
    /// The case shows a fault.
    Found(Finding),
}

/// The results that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// Two runs of `pretrain`: metrics, sample and the last checkpoint.
    Pretrain,
    /// `verify`: initial weights, losses, gradients, replicas and weights.
    Verify,
}

/// The files of a case in its folder.
const RECIPE: &str = "recipe.toml";
const ONE_RANK: &str = "one-rank.toml";

/// Settings that decide how a result is computed, but do not change the result. The run on one rank has none of them.
const OF_LAYOUTS: [&str; 9] = [
    "parallel",
    "memory",
    "data_parallel",
    "kernels",
    "train.check_replicas_every",
    "train.check_replay_every",
    "train.deterministic",
    "train.micro_batch_size",
    "train.log_num_zeros_in_grad",
];

/// Returns the recipe on one rank. It computes all samples of a step at once if the results do not depend on the
/// micro-batches.
pub fn on_one_rank(settings: &Settings) -> Settings {
    let mut one = settings.clone();
    for table in OF_LAYOUTS {
        one.remove(table);
    }
    one.set_text("data_parallel.precision", "f64");
    // The unfused AdamW is Burn's AdamW, which rounds its settings to f32.
    if let Some(optimizer) = settings.get("kernels.optimizer") {
        one.set("kernels.optimizer", optimizer);
    }
    if let Some(zeros) = settings.get("train.log_num_zeros_in_grad") {
        one.set("train.log_num_zeros_in_grad", zeros);
    }
    let losses = settings.get("model.moe.losses").unwrap_or_default();
    // A global balance uses the loads of all ranks. Each rank has one micro-batch.
    let is_global = losses.contains("\"global-balance\"");
    let depends = ["\"balance\"", "\"sequence-balance\"", "\"z-loss\""]
        .iter()
        .any(|it| losses.contains(it))
        || settings.has("model.moe.capacity")
        || settings.is("model.moe.choice", "sinkhorn")
        || settings.is("model.family", "deepseek_v3") && !is_global
        || settings.has("train.batch_warmup");
    let size = if depends {
        "train.micro_batch_size"
    } else {
        "train.global_batch_size"
    };
    if let Some(samples) = settings.get(size) {
        one.set("train.micro_batch_size", samples);
    }
    one
}

impl Runner<'_> {
    /// Runs a case in a folder that contains the data.
    ///
    /// # Errors
    /// Returns an error if a folder or a program cannot be used.
    pub fn check(
        &self,
        settings: &Settings,
        folder: &Path,
        comparison: Comparison,
    ) -> Result<Verdict, String> {
        write(folder, RECIPE, settings)?;
        let found = match comparison {
            Comparison::Pretrain => self.pretrain(settings, folder)?,
            Comparison::Verify => self.verify(folder)?,
        };
        Ok(found.unwrap_or(Verdict::Passed))
    }

    fn pretrain(&self, settings: &Settings, folder: &Path) -> Result<Option<Verdict>, String> {
        let end = self.train(folder, RECIPE, "layout")?;
        if end != End::Complete {
            return Ok(verdict(end, "its layout"));
        }
        write(folder, ONE_RANK, &on_one_rank(settings))?;
        let end = self.train(folder, ONE_RANK, "one-rank")?;
        if end != End::Complete {
            return Ok(verdict(end, "one rank"));
        }
        let differs = |what: String| Some(Verdict::Found(Finding::new(Kind::Differs, what)));
        if let Some(what) = compare::difference(&folder.join("layout"), &folder.join("one-rank")) {
            return Ok(differs(what));
        }
        let diff = self.run(
            folder,
            "diff",
            &["checkpoint", "diff", "layout", "one-rank"],
        )?;
        match diff.code() {
            Some(0) => Ok(None),
            Some(1) => Ok(compare::of_checkpoints(&diff.output()).and_then(differs)),
            _ => Ok(verdict(diff.classify(true), "checkpoint diff")),
        }
    }

    fn train(&self, folder: &Path, recipe: &str, run: &str) -> Result<End, String> {
        let path = folder.join(run);
        // The program would resume or refuse the files of an earlier attempt.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let ended = self.run(folder, run, &pretrain_args(recipe, run))?;
        Ok(ended.classify(path.join("metrics.jsonl").exists()))
    }

    fn verify(&self, folder: &Path) -> Result<Option<Verdict>, String> {
        let ended = self.run(folder, "verify", &VERIFY_ARGS)?;
        match (ended.code(), failing_row(&ended.output())) {
            (Some(1), Some(verdict)) => Ok(Some(verdict)),
            _ => Ok(verdict(
                refused_case(ended.classify(false), &ended.output()),
                "verify",
            )),
        }
    }
}

/// Returns how `verify` ended. If it refuses a case, the error is in its output, since the other cases still run.
fn refused_case(end: End, output: &str) -> End {
    let error = output.lines().find_map(|line| line.strip_prefix("error: "));
    match (end, error) {
        (End::Wrong(finding), Some(error)) if finding.kind == Kind::Failed => {
            End::Refused(error.to_owned())
        }
        (end, _) => end,
    }
}

/// Returns the verdict of the first failing row in the output of `verify`.
fn failing_row(output: &str) -> Option<Verdict> {
    let parse = |row: &str| -> Option<(f64, bool)> {
        let (numbers, reason) = row.split_once(" FAIL")?;
        // Lines without a bound list the cases that failed or could not run.
        let bound = numbers.split_whitespace().next_back()?.parse().ok()?;
        Some((bound, reason.is_empty()))
    };
    let (row, (bound, is_rounding)) =
        (output.lines()).find_map(|line| Some((line, parse(line)?)))?;
    // The FP8 bounds apply to tensors with many elements.
    if bound > EXACT && is_rounding {
        return Some(Verdict::Refused(
            "not compared: verify: rounding exceeds its bound".into(),
        ));
    }
    let words: Vec<_> = row.split_whitespace().collect();
    let message = format!("verify: {}", words.join(" "));
    Some(Verdict::Found(Finding::new(Kind::Differs, message)))
}

/// Returns the verdict of a command that did not complete, or `None` if it completed.
fn verdict(end: End, what: &str) -> Option<Verdict> {
    match end {
        End::Complete => None,
        End::Refused(reason) => Some(Verdict::Refused(format!("{what}: {reason}"))),
        End::Wrong(Finding { kind, message }) => Some(Verdict::Found(Finding::new(
            kind,
            format!("{what}: {message}"),
        ))),
    }
}

fn write(folder: &Path, name: &str, settings: &Settings) -> Result<(), String> {
    let path = folder.join(name);
    fs::write(&path, settings.to_toml()).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns the arguments of a run. Its deadlines end before the deadline of the process, so a hang ends with a report.
fn pretrain_args<'a>(recipe: &'a str, run: &'a str) -> [&'a str; 13] {
    [
        "pretrain",
        "--recipe",
        recipe,
        "--run-dir",
        run,
        "--compute-threads",
        "1",
        "--timeout",
        "30",
        "--first-timeout",
        "60",
        "--heartbeat-timeout",
        "30",
    ]
}

/// The largest bound of `verify` for a layout that rounds the same values as one rank.
const EXACT: f64 = 1e-6;

const VERIFY_ARGS: [&str; 5] = ["verify", "--recipe", RECIPE, "--steps", "2"];

/// Returns the commands that repeat a case in its folder.
pub fn commands(comparison: Comparison) -> String {
    let line = |args: &[&str]| format!("burn-megatron {}", args.join(" "));
    match comparison {
        Comparison::Pretrain => [
            line(&pretrain_args(RECIPE, "layout")),
            line(&pretrain_args(ONE_RANK, "one-rank")),
            line(&["checkpoint", "diff", "layout", "one-rank"]),
        ]
        .join("\n"),
        Comparison::Verify => line(&VERIFY_ARGS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_verify_fails_unless_its_bound_is_one_of_rounding() {
        let verdict = |row: &str| failing_row(&format!("layout  loss  bound  verdict\n{row}\n"));
        assert_eq!(verdict("tp2  1e-14  1e-10  pass"), None);
        assert!(matches!(
            verdict("tp2  1e-4  1e-10  FAIL"),
            Some(Verdict::Found(_))
        ));
        assert!(matches!(
            verdict("tp2  0.5  3.1e-1  FAIL"),
            Some(Verdict::Refused(_))
        ));
        assert_eq!(verdict("1 of 1 cases FAIL:"), None);
        let replicas = verdict("tp2  0.1  3.1e-1  FAIL (replicas of a.b differ)");
        assert!(matches!(replicas, Some(Verdict::Found(_))), "{replicas:?}");
    }

    #[test]
    fn a_case_that_verify_refuses_is_no_fault() {
        let of = |kind| End::Wrong(Finding::new(kind, "exit status: 1"));
        let output = "recipe.toml, in f64\nerror: layout tp2: no\n\n1 of 1 cases FAIL:\n";
        let refused = refused_case(of(Kind::Failed), output);
        assert_eq!(refused, End::Refused("layout tp2: no".into()));
        for (kind, output) in [(Kind::Panicked, output), (Kind::Failed, "")] {
            assert_eq!(refused_case(of(kind), output), of(kind));
        }
    }

    #[test]
    fn one_rank_has_the_model_and_none_of_the_layout() {
        let mut settings = Settings::default();
        settings.set("parallel.tensor", 2);
        settings.set("data_parallel.zero_stage", 1);
        settings.set_text("kernels.optimizer", "unfused");
        settings.set_text("kernels.norm", "unfused");
        settings.set("model.hidden", 16);
        settings.set("train.global_batch_size", 8);
        settings.set("train.micro_batch_size", 2);
        let toml = on_one_rank(&settings).to_toml();
        for (key, is_there) in [
            ("tensor", false),
            ("zero_stage", false),
            ("norm", false),
            ("optimizer = \"unfused\"", true),
            ("hidden = 16", true),
            ("precision = \"f64\"", true),
            ("micro_batch_size = 8", true),
        ] {
            assert_eq!(toml.contains(key), is_there, "{key}: {toml}");
        }
        settings.set(
            "model.moe.losses",
            "[{ kind = \"balance\", coefficient = 0.1 }]",
        );
        let size = |settings: &Settings| on_one_rank(settings).number("train.micro_batch_size");
        assert_eq!(size(&settings), Some(2));
        // DeepSeek-V3 has its own balance, unless other losses are set.
        settings.set_text("model.family", "deepseek_v3");
        settings.set(
            "model.moe.losses",
            "[{ kind = \"global-balance\", coefficient = 0.1 }]",
        );
        assert_eq!(size(&settings), Some(8));
    }
}
