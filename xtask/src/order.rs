//! `cargo xtask check order`: checks that a crate depends only on crates below it, and a module of the core crate
//! only on modules below it.
//!
//! The order is defined only by the two lists of this file. The pages of the documentation that show the lists are
//! compared with them.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::process::{cargo, read_quietly};
use crate::report::Outcome;
use crate::words::tracked_files;

/// The crates that will be published, lowest first, and their folders.
pub const CRATES: [(&str, &str); 15] = [
    ("burn-megatron-kernels", "burn-megatron-kernels"),
    ("burn-megatron-probe", "burn-megatron-probe"),
    ("burn-megatron-rendezvous", "burn-megatron-rendezvous"),
    ("burn-megatron-comm", "burn-megatron-comm"),
    ("burn-megatron-comm-testing", "burn-megatron-comm-testing"),
    ("burn-megatron", "burn-megatron"),
    ("burn-megatron-plot", "burn-megatron-plot"),
    ("burn-megatron-plan", "burn-megatron-plan"),
    ("burn-megatron-models", "models"),
    ("burn-megatron-data", "burn-megatron-data"),
    ("burn-megatron-generate", "burn-megatron-generate"),
    ("burn-megatron-train", "burn-megatron-train"),
    ("burn-megatron-verify", "burn-megatron-verify"),
    ("burn-megatron-learner", "burn-megatron-learner"),
    ("burn-megatron-cli", "cli"),
];

/// The modules of the core crate, lowest first.
const MODULES: [&str; 15] = [
    "regular_file",
    "atomic_file",
    "glob",
    "text_table",
    "device",
    "host_link",
    "kernel_selection",
    "fingerprint",
    "collective",
    "nn",
    "pipeline",
    "data_parallel",
    "optim",
    "checkpoint",
    "model",
];

/// Crates that the core crate must not depend on: plots, progress bars, chat templates and text tables.
const NOT_IN_CORE: [&str; 5] = ["plotters", "indicatif", "textplots", "minijinja", "parquet"];

/// The source of the core crate.
const CORE: &str = "burn-megatron/src";

/// The page that shows both lists.
const PAGE: &str = "docs/src/rules.md";

/// Checks both lists against the manifests, the sources and the page. The check is skipped if git does not list the
/// sources.
pub fn run(root: &Path) -> Outcome {
    match tracked_files(root) {
        Ok(files) => check(root, &files).into(),
        Err(reason) => Outcome::Skipped(reason),
    }
}

/// Checks the crates, the modules and the page.
///
/// # Errors
/// Returns a line for each import or dependency against the order, and for each crate or module that is not listed.
fn check(root: &Path, files: &[String]) -> Result<(), String> {
    let mut metadata = String::new();
    let args = ["metadata", "--no-deps", "--format-version", "1"];
    read_quietly(&mut cargo(root, &args), |line| metadata.push_str(line))?;
    let mut faults = of_crates(&metadata)?;
    faults.extend(of_modules(root, files)?);
    for features in ["", "mpi,tracing"] {
        let mut tree = String::new();
        let args = "tree --package burn-megatron --edges normal --prefix none --features";
        let args: Vec<_> = args.split(' ').chain([features]).collect();
        read_quietly(&mut cargo(root, &args), |line| {
            tree.push_str(line);
            tree.push('\n');
        })?;
        faults.extend(of_tree(&tree));
    }
    let page = fs::read_to_string(root.join(PAGE)).map_err(|error| format!("{PAGE}: {error}"))?;
    faults.extend(of_page(&page));
    if faults.is_empty() {
        Ok(())
    } else {
        Err(faults.join("\n"))
    }
}

/// Returns the faults of the crates, from the output of `cargo metadata`.
fn of_crates(metadata: &str) -> Result<Vec<String>, String> {
    let metadata: Value = serde_json::from_str(metadata).map_err(|error| error.to_string())?;
    let place = |name: &str| CRATES.iter().position(|(listed, _)| *listed == name);
    let mut faults = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let is_published = package["publish"].is_null();
        let Some(own) = place(name) else {
            if is_published {
                faults.push(format!("the crate {name} is not in xtask/src/order.rs"));
            }
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let (on, kind) = (dependency["name"].as_str(), &dependency["kind"]);
            if let (Some(on), true) = (on, kind.is_null())
                && place(on).is_some_and(|place| place >= own)
            {
                faults.push(format!("{name} depends on {on}, which is above it"));
            }
        }
    }
    Ok(faults)
}

/// Returns the dependencies of the core crate that are not allowed, from the output of `cargo tree`.
fn of_tree(tree: &str) -> Vec<String> {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    names
        .filter(|name| NOT_IN_CORE.contains(name))
        .map(|name| format!("burn-megatron builds {name}, which belongs to a crate above it"))
        .collect()
}

fn of_modules(root: &Path, files: &[String]) -> Result<Vec<String>, String> {
    let mut faults = Vec::new();
    for file in files {
        let path = Path::new(file);
        let Ok(within) = path.strip_prefix(CORE) else {
            continue;
        };
        let first = within.iter().next().map(Path::new);
        let module = first.and_then(Path::file_stem).and_then(|it| it.to_str());
        if let (Some(module), false) = (module, is_test(file) || !file.ends_with(".rs")) {
            let text =
                fs::read_to_string(root.join(path)).map_err(|error| format!("{file}: {error}"))?;
            faults.extend(of_file(module, file, &text));
        }
    }
    Ok(faults)
}

fn is_test(file: &str) -> bool {
    file.contains("/tests/") || file.ends_with("/tests.rs") || file.ends_with("_tests.rs")
}

/// Returns the imports of a file of `module` that are against the order. Imports of its tests are left out.
fn of_file(module: &str, file: &str, text: &str) -> Vec<String> {
    if ["lib", "testing"].contains(&module) {
        return vec![];
    }
    let place = |name: &str| MODULES.iter().position(|listed| *listed == name);
    let Some(own) = place(module) else {
        return vec![format!(
            "{file}: the module {module} is not in xtask/src/order.rs"
        )];
    };
    let product = text.split("#[cfg(test)]\nmod tests {").next();
    let lines = (1..).zip(product.unwrap_or_default().lines());
    let code = lines.filter(|(_, line)| !line.trim_start().starts_with("//"));
    code.flat_map(|(number, line)| line.split("crate::").skip(1).map(move |it| (number, it)))
        .filter_map(|(number, path)| {
            let end = path.find(|it: char| !it.is_alphanumeric() && it != '_');
            let name = &path[..end.unwrap_or(path.len())];
            place(name)
                .filter(|place| *place > own)
                .map(|_| format!("{file}:{number}: {module} imports {name}, which is above it"))
        })
        .collect()
}

/// Returns a fault for each list that the page does not show unchanged.
fn of_page(page: &str) -> Vec<String> {
    let names: Vec<_> = CRATES.iter().map(|(name, _)| *name).collect();
    let lists = [names.join("  "), MODULES.join("  ")];
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let page = words(page);
    let missing = lists.iter().filter(|list| !page.contains(&words(list)));
    missing
        .map(|list| format!("{PAGE} does not have this list:\n{list}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_that_depends_on_one_above_it_is_found() {
        let metadata = |name: &str, on: &str, kind: &str| {
            let dependency = format!(r#"{{"name": "{on}", "kind": {kind}}}"#);
            format!(r#"{{"packages": [{{"name": "{name}", "dependencies": [{dependency}]}}]}}"#)
        };
        let faults = |name, on, kind| of_crates(&metadata(name, on, kind)).unwrap();
        let found = faults("burn-megatron", "burn-megatron-train", "null");
        assert_eq!(
            found,
            ["burn-megatron depends on burn-megatron-train, which is above it"]
        );
        assert!(faults("burn-megatron", "burn-megatron-train", "\"dev\"").is_empty());
        assert!(faults("burn-megatron-train", "burn-megatron", "null").is_empty());
        let found = faults("burn-megatron-new", "burn-megatron", "null");
        assert_eq!(
            found,
            ["the crate burn-megatron-new is not in xtask/src/order.rs"]
        );
    }

    #[test]
    fn a_crate_that_core_must_not_build_is_found() {
        let found = of_tree("burn-megatron v0.1.0\nserde v1.0.1\nplotters v0.3.7\n");
        assert_eq!(
            found,
            ["burn-megatron builds plotters, which belongs to a crate above it"]
        );
    }

    #[test]
    fn an_import_from_above_is_found_and_one_in_a_comment_or_a_test_is_not() {
        let text = "use crate::optim::A;\n// crate::model\nuse crate::collective::B;\n\
                    #[cfg(test)]\nmod tests {\n    use crate::model::C;\n}\n";
        assert_eq!(
            of_file("nn", "nn/a.rs", text),
            ["nn/a.rs:1: nn imports optim, which is above it"]
        );
        assert_eq!(
            of_file("other", "other.rs", ""),
            ["other.rs: the module other is not in xtask/src/order.rs"]
        );
    }
}
