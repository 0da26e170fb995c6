//! Compares the counts of markers with budgets, which may only fall.

use std::fs;
use std::path::Path;

use super::count::{Count, TYPES, summary};

/// The table of budgets: a file type, a tab, and the maximum count.
pub const TABLE: &str = "xtask/word-budgets.tsv";

/// Prints the counts, and compares them with the budgets.
///
/// # Errors
/// Returns each count above its budget, or a mistake in the table.
pub fn check(root: &Path, counts: &[Count; TYPES.len()]) -> Result<(), String> {
    print!("{}", summary(counts));
    let path = root.join(TABLE);
    let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let counts = counts.each_ref().map(|count| count.marked);
    let (notes, result) = compare(&parse(&text)?, &counts);
    for note in notes {
        println!("{note}");
    }
    result
}

/// Reads the table. Empty lines and lines that begin with `#` are skipped.
fn parse(text: &str) -> Result<[usize; TYPES.len()], String> {
    let mut budgets = [None; TYPES.len()];
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let invalid = || {
            let types = TYPES.join(", ");
            format!("{TABLE}:{number}: expected `type<TAB>count` with one of {types}, got {line:?}")
        };
        let (name, count) = line.split_once('\t').ok_or_else(invalid)?;
        let at = TYPES.iter().position(|known| *known == name);
        let budget = &mut budgets[at.ok_or_else(invalid)?];
        if budget.is_some() {
            return Err(format!("{TABLE}:{number}: {name} is listed twice"));
        }
        *budget = Some(count.trim().parse().map_err(|_| invalid())?);
    }
    let missing = TYPES
        .iter()
        .zip(budgets)
        .find(|(_, budget)| budget.is_none());
    match missing {
        Some((name, _)) => Err(format!("{TABLE}: {name} is missing")),
        None => Ok(budgets.map(Option::unwrap_or_default)),
    }
}

/// Returns notes on budgets that can fall by more than a tenth. Returns an error if a count is above its budget.
fn compare(
    budgets: &[usize; TYPES.len()],
    counts: &[usize; TYPES.len()],
) -> (Vec<String>, Result<(), String>) {
    let (mut notes, mut failures) = (vec![], vec![]);
    for ((name, budget), count) in TYPES.iter().zip(budgets).zip(counts) {
        if count > budget {
            failures.push(format!(
                "{name}: {count} with a marker, and the budget is {budget}"
            ));
        } else if count * 10 < budget * 9 {
            notes.push(format!(
                "{name}: lower the budget in {TABLE} from {budget} to {count}"
            ));
        }
    }
    if failures.is_empty() {
        return (notes, Ok(()));
    }
    failures.push("Run `cargo xtask check words --list`, and reword the new sentences.".into());
    (notes, Err(failures.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: &str = "# type\tcount\nbook\t1\nreadme\t2\n\nguides\t3\nrustdoc\t4\nstrings\t5\n";

    #[test]
    fn the_table_is_read_and_its_mistakes_are_named() {
        assert_eq!(parse(FULL), Ok([1, 2, 3, 4, 5]));
        for (text, wanted) in [
            ("book 1", ":1: expected `type<TAB>count`"),
            ("\nbook\tx", ":2: expected"),
            ("page\t1", "got \"page\\t1\""),
            ("book\t1\nbook\t1", ":2: book is listed twice"),
            ("book\t1", "readme is missing"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_count_above_its_budget_fails_and_one_far_below_is_noted() {
        let budgets = [100, 100, 100, 0, 100];
        let (notes, result) = compare(&budgets, &[100, 90, 89, 0, 0]);
        let lower = |name, count| {
            format!("{name}: lower the budget in xtask/word-budgets.tsv from 100 to {count}")
        };
        assert_eq!(notes, [lower("guides", 89), lower("strings", 0)]);
        assert_eq!(result, Ok(()));
        let (_, result) = compare(&budgets, &[101, 0, 0, 1, 0]);
        let error = result.unwrap_err();
        assert!(error.starts_with(
            "book: 101 with a marker, and the budget is 100\nrustdoc: 1 with a marker, and the budget is 0\n"
        ));
    }
}
