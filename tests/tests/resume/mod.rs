//! Tests that a saved run resumes as if it had not stopped, also in another layout.

mod matrix;
pub mod run;
mod same;
mod strict;
