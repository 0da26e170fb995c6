//! `cargo xtask check settings`: counts the product files that mention the name of a setting.
//!
//! A setting should be declared once. `xtask/setting-names.tsv` contains a sample of names, one per line: the name, a
//! tab, and the maximum number of product files that may mention it. The numbers may only fall.

use std::fs;
use std::path::Path;

use crate::lines::product_files;
use crate::words::has_word;

const LIST: &str = "xtask/setting-names.tsv";

/// Counts the files of each name, and prints the median.
///
/// # Errors
/// Returns the names that occur in more files than the list allows.
pub fn run(root: &Path) -> Result<(), String> {
    let list = fs::read_to_string(root.join(LIST)).map_err(|e| format!("{LIST}: {e}"))?;
    let texts = product_files(root)?.into_iter().map(|(_, text)| text);
    let texts: Vec<_> = texts.collect();
    println!("{}", check(&parse(&list)?, &texts)?);
    Ok(())
}

/// Reads the names and their numbers. Lines that begin with `#` are skipped.
fn parse(list: &str) -> Result<Vec<(&str, usize)>, String> {
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    let parsed = lines.map(|line| {
        let (name, files) = line.split_once('\t')?;
        Some((name, files.parse().ok()?))
    });
    let parsed: Option<Vec<_>> = parsed.collect();
    parsed.ok_or_else(|| format!("invalid {LIST}: expected `name<TAB>number` in each line"))
}

/// Compares the numbers of files with the numbers of the list, and returns a summary.
fn check(list: &[(&str, usize)], texts: &[String]) -> Result<String, String> {
    let (mut counts, mut more, mut fewer) = (vec![], vec![], vec![]);
    for (name, allowed) in list {
        let files = texts.iter().filter(|text| has_word(text, name)).count();
        if files > *allowed {
            more.push(format!(
                "{name}: {files} files, and {LIST} allows {allowed}"
            ));
        } else if files < *allowed {
            fewer.push(format!("; {name} can be lowered to {files}"));
        }
        counts.push(files);
    }
    if !more.is_empty() {
        return Err(format!(
            "more product files mention a setting: read it where its technique is\n{}",
            more.join("\n")
        ));
    }
    counts.sort_unstable();
    let middle = [counts.len().saturating_sub(1) / 2, counts.len() / 2];
    let middle: usize = middle.iter().filter_map(|at| counts.get(*at)).sum();
    let median = middle as f64 / 2.0;
    Ok(format!(
        "{} settings, each in {median} product files (median){}",
        counts.len(),
        fewer.concat()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_more_files_is_an_error() {
        let texts = ["a b_c", "b_c", "x.b_c; a_", "d"].map(String::from);
        let list = parse("# a comment\na\t1\nb_c\t4\nd\t1\ne\t0").unwrap();
        let summary = check(&list, &texts).unwrap();
        let expected = "4 settings, each in 1 product files (median); b_c can be lowered to 3";
        assert_eq!(summary, expected);
        let error = check(&[("b_c", 2)], &texts).unwrap_err();
        assert!(error.contains("b_c: 3 files"), "{error}");
        assert!(parse("a 1").is_err());
    }
}
