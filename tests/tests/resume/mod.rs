//! A saved run resumes as if it had not stopped, also under another layout.

mod matrix;
pub mod run;
mod same;
mod strict;
