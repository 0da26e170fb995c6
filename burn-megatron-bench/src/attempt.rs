//! Rows of a benchmark that fail without ending the benchmark.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::count;

/// Runs the work of one row. An error or a panic is returned as text, so that the rows after it run.
pub fn attempt<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(panic) => Err(format!("panic: {}", text(&*panic))),
    }
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

/// Returns success, or an error with the number of failed rows.
pub fn finish(command: &str, failed: usize, all: usize) -> Result<ExitCode, Error> {
    match failed {
        0 => Ok(ExitCode::SUCCESS),
        _ => Err(format!(
            "{command}: {failed} of {} failed, see above",
            count(all, "row")
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_and_panics_become_reasons() {
        assert_eq!(attempt(|| Ok(1)), Ok(1));
        assert_eq!(
            attempt::<()>(|| Err("no room".into())),
            Err("no room".into())
        );
        let empty: Vec<u8> = vec![];
        let reason = attempt(|| Ok(empty[empty.len()])).unwrap_err();
        assert!(reason.starts_with("panic: index out of bounds"), "{reason}");
        assert!(finish("step", 0, 3).is_ok());
        let error = finish("step", 1, 3).unwrap_err().to_string();
        assert_eq!(error, "step: 1 of 3 rows failed, see above");
    }
}
