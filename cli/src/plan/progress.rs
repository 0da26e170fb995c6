//! Progress of a search, printed to standard error.

use std::time::Duration;

use burn_megatron_plan::search::SearchProgress;

use crate::numbers::grouped;
use crate::slow_progress::SlowProgress;

/// Progress output of a search.
pub struct PlanProgress(SlowProgress);

impl Default for PlanProgress {
    fn default() -> Self {
        let template = "{bar:10.cyan/blue}  {wide_msg}";
        Self(SlowProgress::new(template, Duration::from_secs(5)))
    }
}

impl PlanProgress {
    /// Shows the current progress.
    pub fn show(&self, at: SearchProgress) {
        self.0.show(at.compared as u64, at.all as u64, line(at));
    }
}

fn line(at: SearchProgress) -> String {
    format!(
        "planning: compared {} of {} layouts, computed the memory of {}",
        grouped(at.compared),
        grouped(at.all),
        grouped(at.confirmed),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_how_far_the_search_is() {
        let at = SearchProgress {
            compared: 1200,
            all: 3400,
            confirmed: 12,
        };
        insta::assert_snapshot!(
            line(at),
            @"planning: compared 1,200 of 3,400 layouts, computed the memory of 12"
        );
    }
}
