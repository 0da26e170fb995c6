//! Implements `burn-megatron verify`.

use std::process::ExitCode;

use burn_megatron_verify::{Layout, VerifyError, VerifyReport};

use crate::error::Error;
use crate::family::Families;
use crate::terminal;

use args::VerifyArgs;
use cases::VerifyCase;

mod against;
pub mod args;
mod cases;
mod faults;
pub(crate) mod models;

/// Prints a table for each case, and the cases that failed. The exit code is 0 if all cases pass.
pub fn run(
    args: &VerifyArgs,
    families: &Families,
    default_recipe: &str,
) -> Result<ExitCode, Error> {
    if args.faults {
        return faults::run();
    }
    if let Some(folder) = &args.against {
        return against::run(folder, args.tolerance, families);
    }
    let cases = cases::cases(args, families, default_recipe)?;
    let failures = run_cases(&cases, |case| {
        let (model, options) = (&case.recipe.model, case.options(args));
        model.verify(case.subject(), &case.layouts, &options)
    });
    println!("{}", conclusion(cases.len(), &failures));
    Ok(if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Verifies all cases, and prints a table for each. A case that fails or cannot run does not stop the other cases.
/// Returns a line for each failed case.
fn run_cases(
    cases: &[VerifyCase],
    verify: impl Fn(&VerifyCase) -> Result<VerifyReport, VerifyError>,
) -> Vec<String> {
    let mut failures = vec![];
    for case in cases {
        let name = format!("{}, in {}", case.name, case.computing.name());
        eprintln!("{name}");
        match verify(case) {
            Ok(report) => {
                let table = report.fit(terminal::width());
                println!("{name}\n{}\n", terminal::wrapped(&table));
                let list = |what: &str, layouts: Vec<String>| {
                    (!layouts.is_empty()).then(|| format!("{what} {}", layouts.join(", ")))
                };
                let failing = report.failing().map(Layout::to_string).collect();
                let not_run = report.not_run().iter();
                let not_run = not_run.map(|(layout, _)| layout.to_string()).collect();
                let lists = [list("FAIL in", failing), list("not run in", not_run)];
                let lists: Vec<_> = lists.into_iter().flatten().collect();
                if !lists.is_empty() {
                    failures.push(format!("{name}: {}", lists.join(", ")));
                }
            }
            Err(error) => {
                println!("{name}\nerror: {error}\n");
                failures.push(format!("{name}: error: {error}"));
            }
        }
    }
    failures
}

/// Returns the last lines of the output.
fn conclusion(cases: usize, failures: &[String]) -> String {
    if failures.is_empty() {
        return "all layouts pass".into();
    }
    let heading = format!("{} of {cases} cases FAIL:", failures.len());
    let lines = failures.iter().map(|failure| format!("\n  {failure}"));
    lines.fold(heading, |text, line| text + &line)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::flags::parse_text;

    /// Returns cases of one small recipe with these settings.
    fn cases_of(settings: &[&str]) -> (VerifyArgs, Vec<VerifyCase>) {
        let folder = tempfile::tempdir().unwrap();
        let of = |setting: &&str| {
            let file = folder.path().join("recipe.toml");
            let model =
                "layers = 1\nhidden = 8\nheads = 2\ngroups = 2\ncontext = 4\nvocabulary = 11";
            let recipe = format!(
                "[parallel]\ndata = 2\n[train]\nmicro_batch_size = 1\n[model]\n{model}\n{setting}\n"
            );
            std::fs::write(&file, recipe).unwrap();
            let flags = format!(
                "--steps 1 --global-batch-size 2 --recipe {}",
                file.display()
            );
            let args = parse_text(&flags).unwrap();
            let found = cases::cases(&args, &Families::transformers(), "").unwrap();
            (args, found.into_iter().next().unwrap())
        };
        let (args, cases): (Vec<_>, Vec<_>) = settings.iter().map(of).unzip();
        (args.into_iter().next().unwrap(), cases)
    }

    #[test]
    fn a_layout_that_cannot_run_is_listed_and_the_others_run() {
        let (args, mut cases) = cases_of(&[""]);
        let layouts = ["tp3", "dp2", "dp3"].map(|name| name.parse().unwrap());
        cases[0].layouts = layouts.to_vec();
        let verify = |case: &VerifyCase| {
            let options = case.options(&args);
            let model = &case.recipe.model;
            model.verify(case.subject(), &case.layouts, &options)
        };
        let report = verify(&cases[0]).unwrap();
        let ran: Vec<_> = report
            .rows()
            .iter()
            .map(|(layout, _)| layout.to_string())
            .collect();
        assert_eq!(ran, ["tp1-dp2"]);
        assert!(!report.passes());
        let text = report.fit(None);
        assert!(text.contains("\nnot run: tp3-dp1: "), "{text}");
        assert!(text.contains("\nnot run: tp1-dp3: "), "{text}");
        let name = &cases[0].name;
        let expected = format!("{name}, in f64: not run in tp3-dp1, tp1-dp3");
        assert_eq!(run_cases(&cases, verify), [expected]);
    }

    #[test]
    fn layouts_that_no_model_supports_are_an_error() {
        for layouts in ["tp3", "tp2,tp3"] {
            let args = parse_text(&format!("--layouts {layouts}")).unwrap();
            let refused = cases::cases(&args, &Families::transformers(), "").err();
            let text = refused.map(|error| error.to_string()).unwrap_or_default();
            let expected = "no model supports layout tp3-dp1: heads 4 cannot be split";
            assert!(text.starts_with(expected), "{layouts}: {text}");
        }
    }

    #[test]
    fn cases_after_one_that_cannot_run_or_fails_run_too() {
        let impossible = "qk_norm = \"heads\"\n[train.qk_clip]\nthreshold = 1.0";
        let (args, mut cases) = cases_of(&[impossible, "", ""]);
        for (case, name) in cases.iter_mut().zip(["first", "second", "third"]) {
            case.name = name.into();
        }
        let ran = std::cell::RefCell::new(vec![]);
        let failures = run_cases(&cases, |case| {
            ran.borrow_mut().push(case.name.clone());
            let mut options = case.options(&args);
            // No difference is within this bound.
            if case.name == "second" {
                options.tolerance = -1.0;
            }
            case.recipe
                .model
                .verify(case.subject(), &case.layouts, &options)
        });
        assert_eq!(*ran.borrow(), ["first", "second", "third"]);
        assert_eq!(failures.len(), 2, "{failures:?}");
        let first =
            "first, in f64: error: layout tp1-dp1: rank 0 failed: qk_clip cannot limit the logits";
        assert!(failures[0].starts_with(first), "{}", failures[0]);
        assert_snapshot!(failures[1], @"second, in f64: FAIL in tp1-dp2-mb1");
        let text = conclusion(3, &failures);
        assert!(
            text.starts_with("2 of 3 cases FAIL:\n  first, in f64: error"),
            "{text}"
        );
        assert_snapshot!(conclusion(3, &[]), @"all layouts pass");
    }
}
