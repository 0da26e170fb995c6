//! A run that is saved goes on as if it had never stopped, and under any other layout.

mod matrix;
mod run;
mod same;
mod strict;
