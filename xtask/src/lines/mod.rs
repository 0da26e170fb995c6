//! `cargo xtask lines`: counts the lines of code by purpose.

mod count;
pub mod tokens;

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;

use crate::report::Report;
use crate::words::tracked_files;

use count::CountedFile;

/// The purpose of a line, which depends on its file. Test items within a file count as tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// The crates that are shipped.
    Product,
    /// The emulated GPU, the checks of compiled kernels and the fuzz targets in `tools/`.
    Lab,
    /// The checks of this repository.
    Xtask,
    /// Complete programs that show how to use the library.
    Examples,
    /// Tests, benchmarks and their helpers.
    Tests,
}

impl Purpose {
    const ALL: [Self; 5] = [
        Self::Product,
        Self::Lab,
        Self::Xtask,
        Self::Examples,
        Self::Tests,
    ];

    /// Returns the purpose of a file by its path relative to the repository.
    fn of(path: &str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let folders: Vec<_> = folder.split('/').collect();
        let is_in = |names: &[&str]| folders.iter().any(|folder| names.contains(folder));
        if is_in(&["tests", "benches"]) || name == "tests.rs" || name.ends_with("_tests.rs") {
            Self::Tests
        } else if is_in(&["examples"]) {
            Self::Examples
        } else {
            match folders.first() {
                Some(&("tools" | "lab")) => Self::Lab,
                Some(&"xtask") => Self::Xtask,
                _ => Self::Product,
            }
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Product => "product",
            Self::Lab => "tools",
            Self::Xtask => "xtask",
            Self::Examples => "examples",
            Self::Tests => "tests",
        })
    }
}

/// The folders that every contributor must know.
const CORE: [&str; 3] = [
    "burn-megatron-comm/",
    "burn-megatron/",
    "burn-megatron-train/",
];
/// Subfolders of these folders that only some contributors need.
const NOT_CORE: [&str; 4] = [
    "burn-megatron-comm/src/engines/nccl",
    "burn-megatron-comm/src/engines/mpi",
    "burn-megatron-comm/src/engines/p2p_collectives",
    "burn-megatron-train/src/hooks",
];

fn is_core(path: &str) -> bool {
    let is_in = |folders: &[&str]| folders.iter().any(|folder| path.starts_with(folder));
    is_in(&CORE) && !is_in(&NOT_CORE)
}

/// Counts every tracked Rust file, and prints the totals and the longest product files.
pub fn run(root: &Path, report: &mut Report) {
    report.step("lines", || {
        let files = read(root)?;
        print!("{}", table(&files));
        Ok::<_, String>(())
    });
}

fn read(root: &Path) -> Result<Vec<CountedFile>, String> {
    let paths = tracked_files(root)?.into_iter();
    let paths = paths.filter(|path| path.ends_with(".rs"));
    // A tracked file may be deleted.
    let present = paths.filter(|path| root.join(path).is_file());
    let files = present.map(|path| {
        let text = fs::read_to_string(root.join(&path)).map_err(|e| format!("{path}: {e}"))?;
        Ok(CountedFile::new(path, &text))
    });
    files.collect()
}

/// Returns the paths and texts of all product files, without test items.
///
/// # Errors
/// Returns an error if a file cannot be read.
pub fn product_files(root: &Path) -> Result<Vec<(String, String)>, String> {
    let files = read(root)?;
    let purposes = purposes(&files);
    let files = files.into_iter().zip(purposes);
    let product = files.filter(|(_, purpose)| *purpose == Purpose::Product);
    let texts = product.map(|(file, _)| (file.path, file.untested));
    Ok(texts.collect())
}

/// Returns the purpose of each file.
fn purposes(files: &[CountedFile]) -> Vec<Purpose> {
    // The files of modules that are declared with `#[cfg(test)]`, without the ending.
    let modules: BTreeSet<_> = files.iter().flat_map(CountedFile::test_modules).collect();
    let is_test = |file: &CountedFile| {
        let stem = file.path.trim_end_matches(".rs");
        let mut parents = stem.match_indices('/').map(|(end, _)| &stem[..end]);
        modules.contains(stem) || parents.any(|parent| modules.contains(parent))
    };
    let purpose = |file: &CountedFile| match Purpose::of(&file.path) {
        Purpose::Product if is_test(file) => Purpose::Tests,
        purpose => purpose,
    };
    files.iter().map(purpose).collect()
}

fn table(files: &[CountedFile]) -> String {
    let mut lines = [0; Purpose::ALL.len()];
    let (mut product, mut core) = (vec![], 0);
    for (file, purpose) in files.iter().zip(purposes(files)) {
        lines[purpose as usize] += file.code;
        lines[Purpose::Tests as usize] += file.tests;
        if purpose == Purpose::Product {
            product.push(file.all);
            core += file.code * usize::from(is_core(&file.path));
        }
    }
    product.sort_unstable();
    let rows = Purpose::ALL.iter().zip(lines);
    let rows: String = rows
        .map(|(purpose, lines)| format!("{purpose:<10} {lines:>8}\n"))
        .collect();
    let (median, longest) = (product.get(product.len() / 2), product.last());
    format!(
        "{rows}{:<10} {:>8}\n\
         product lines of comm, core and train, without hooks and the engines of NCCL and MPI: {core}\n\
         product files: {}; median {} and at most {} lines with comments and tests\n",
        "all",
        lines.iter().sum::<usize>(),
        product.len(),
        median.unwrap_or(&0),
        longest.unwrap_or(&0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(path: &str, text: &str) -> CountedFile {
        CountedFile::new(path.into(), text)
    }

    #[test]
    fn the_path_of_a_file_tells_its_purpose() {
        for (path, purpose) in [
            ("cli/src/main.rs", Purpose::Product),
            ("cli/build.rs", Purpose::Product),
            ("burn-megatron-bench/src/gemm.rs", Purpose::Product),
            ("models/src/tests.rs", Purpose::Tests),
            ("models/src/hf/tests/llama.rs", Purpose::Tests),
            ("models/src/moe_tests.rs", Purpose::Tests),
            ("models/src/latests.rs", Purpose::Product),
            ("tests/src/heap.rs", Purpose::Tests),
            (
                "burn-megatron-learner/examples/a/main.rs",
                Purpose::Examples,
            ),
            ("tools/emulator/src/lib.rs", Purpose::Lab),
            ("tools/emulator/tests/a.rs", Purpose::Tests),
            ("xtask/src/main.rs", Purpose::Xtask),
        ] {
            assert_eq!(Purpose::of(path), purpose, "{path}");
        }
    }

    #[test]
    fn modules_of_tests_are_tests() {
        let files = [
            counted("a/src/lib.rs", "mod b;\n#[cfg(test)]\nmod harness;\n"),
            counted("a/src/b.rs", "fn one() {}\n"),
            counted("a/src/harness.rs", "mod inner;\nfn two() {}\n"),
            counted("a/src/harness/inner.rs", "fn three() {}\n"),
        ];
        let printed = table(&files);
        let words: Vec<_> = printed.split_whitespace().collect();
        assert_eq!(words[..2], ["product", "2"]);
        assert_eq!(words[8..12], ["tests", "5", "all", "7"], "{printed}");
    }
}
