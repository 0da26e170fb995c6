//! `cargo xtask check`: checks that need no run of the tests or programs.

use std::fs;
use std::path::Path;

use clap::ValueEnum;

use crate::circles;
use crate::mpi;
use crate::order::{self, CRATES};
use crate::process::{cargo, run as run_command};
use crate::report::{Outcome, Report};
use crate::settings;
use crate::test::PARQUET_FEATURES;
use crate::words;
use crate::workflows;

/// A check of the tree.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
pub enum Check {
    /// rustfmt leaves every file as it is.
    Format,
    /// No tracked file contains a name or phrase of xtask/retired-words.tsv. The number of sentences that are hard to
    /// read stays within xtask/word-budgets.tsv. `--list` prints these sentences.
    Words,
    /// Crates, and the modules of the core crate, import only crates or modules below them.
    Order,
    /// The number of product files that mention a setting stays within xtask/setting-names.tsv.
    Settings,
    /// No circle of files that import each other is larger than the limit in xtask/src/circles.rs.
    Circles,
    /// clippy reports nothing, on any target.
    Lint,
    /// rustdoc reports nothing: every link in the documentation resolves.
    Docs,
    /// The CUDA build compiles, and clippy reports nothing in the code that only the CUDA build compiles. Needs no GPU and no CUDA toolkit. The build sets DOCS_RS=1, so that the build script of a
    /// dependency does not download LLVM. Only linking needs LLVM, and checking does not link.
    Cuda,
    /// The check `cuda` with the feature `fusion` of Burn.
    Fusion,
    /// The command compiles without default features, and clippy reports nothing in code that only this build
    /// compiles.
    Small,
    /// The crates that will be published can be packaged, with their licences. The packages in target/package are not
    /// built.
    Package,
    /// actionlint reports nothing in the workflows of GitHub Actions. A missing actionlint is installed with pip,
    /// which downloads it from the actionlint release.
    Workflows,
    /// All of these except fusion, small and workflows.
    All,
}

/// Runs one check or all of them.
pub fn run(check: Check, root: &Path, report: &mut Report) {
    // With other features cargo builds everything again. The check of workflows may need a network.
    let is_extra = |this| matches!(this, Check::Fusion | Check::Small | Check::Workflows);
    let wanted = |this| check == this || (check == Check::All && !is_extra(this));
    if wanted(Check::Format) {
        report.step("format", || {
            run_command(&mut cargo(root, &["fmt", "--all", "--check"]))
        });
    }
    if wanted(Check::Words) {
        report.step("words", || words::run(root));
    }
    if wanted(Check::Order) {
        report.step("order", || order::run(root));
    }
    if wanted(Check::Settings) {
        report.step("settings", || settings::run(root));
    }
    if wanted(Check::Circles) {
        report.step("circles", || circles::run(root));
    }
    if wanted(Check::Lint) {
        // The CUDA checks cover the builds without these features.
        report.step("lint", || match mpi::missing().as_slice() {
            [] => lint(root, &format!("{},{PARQUET_FEATURES}", mpi::FEATURES)),
            missing => {
                println!("without mpi: missing: {}", missing.join(" and "));
                lint(root, PARQUET_FEATURES)
            }
        });
    }
    if wanted(Check::Docs) {
        let args = ["doc", "--workspace", "--no-deps"];
        report.step("docs", || {
            run_command(cargo(root, &args).env("RUSTDOCFLAGS", "-D warnings"))
        });
    }
    if wanted(Check::Fusion) {
        report.step("cuda with fusion", || {
            cuda(root, "cuda,fusion", &["--lib", "--bins"])
        });
    }
    if wanted(Check::Cuda) {
        // The targets include the tests that `emulate` and machines with a GPU run.
        report.step("cuda", || cuda(root, "cuda", &["--all-targets"]));
    }
    if wanted(Check::Small) {
        let args = ["clippy", "-p", "burn-megatron-cli", "--no-default-features"];
        let args = [&args[..], &["--lib", "--bins", "--", "-D", "warnings"]].concat();
        report.step("small build", || run_command(&mut cargo(root, &args)));
    }
    if wanted(Check::Package) {
        report.step("package", || package(root));
    }
    if wanted(Check::Workflows) {
        report.step("workflows", || workflows::run(root));
    }
}

/// Prints the items that a check counts, without a verdict.
pub fn list(check: Check, root: &Path, report: &mut Report) {
    report.step("list", || match check {
        Check::Words => words::list(root),
        _ => Outcome::Failed("--list requires `check words`".into()),
    });
}

fn lint(root: &Path, features: &str) -> Result<(), String> {
    let clippy = ["clippy", "--workspace", "--all-targets", "--features"];
    let args = [&clippy[..], &[features, "--", "-D", "warnings"]].concat();
    run_command(&mut cargo(root, &args))
}

/// The licence files of a crate. They are symbolic links, which an archive of the sources may have replaced.
const LICENCES: [&str; 2] = ["LICENSE-MIT", "LICENSE-APACHE"];

fn package(root: &Path) -> Result<(), String> {
    let licences = CRATES
        .iter()
        .flat_map(|(_, folder)| LICENCES.map(|licence| (folder, licence)));
    for (folder, licence) in licences {
        let read =
            |path: &Path| fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
        let own = root.join(folder).join(licence);
        if read(&own)? != read(&root.join(licence))? {
            return Err(format!(
                "{} is not the licence of the repository",
                own.display()
            ));
        }
    }
    // Uncommitted changes are packaged too: like all other checks, this check covers the working tree.
    let mut package = cargo(
        root,
        &["package", "--no-verify", "--allow-dirty", "--quiet"],
    );
    for (name, _) in CRATES {
        package.args(["--package", name]);
    }
    run_command(&mut package)
}

fn cuda(root: &Path, features: &str, targets: &[&str]) -> Result<(), String> {
    let packages = [
        "clippy",
        "-p",
        "burn-megatron-cli",
        "-p",
        "burn-megatron-bench",
        "-p",
        "burn-megatron-kernels",
        "-p",
        "burn-megatron-comm",
        "-p",
        "burn-megatron",
        "-p",
        "burn-megatron-learner",
        "-p",
        "burn-megatron-tests",
    ];
    let features = ["--features", features, "--", "-D", "warnings"];
    let args = [&packages[..], targets, &features].concat();
    run_command(cargo(root, &args).env("DOCS_RS", "1"))
}
