//! All tests of this crate, except the tests that Cargo.toml lists.

mod check_gpu;
mod checkpoint;
mod diverged;
mod earlier;
mod earlier_families;
mod experts;
mod finetune;
mod hangs;
mod hugging_face;
mod launch;
mod no_recipe;
mod outputs;
mod preprocess;
mod resume;
mod strange_files;
mod upcycle;
mod verify;
