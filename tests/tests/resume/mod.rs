//! A saved run resumes as if it had not stopped, also under another layout.

mod matrix;
mod run;
mod same;
mod strict;
