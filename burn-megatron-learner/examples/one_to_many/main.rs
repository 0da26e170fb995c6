//! The programs of the page "From one device to many": each module is a whole `main.rs`. They train the same model on the same
//! data, and print its loss on held-out samples.
//!
//! ```text
//! cargo run --release -p burn-megatron-learner --example one_to_many
//! ```

mod data_parallel;
mod one_device;
mod pipeline;
mod tensor_parallel;
mod zero;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Runs all of them.
pub fn main() -> Result<(), AnyError> {
    one_device::main()?;
    data_parallel::main()?;
    zero::main()?;
    tensor_parallel::main()?;
    pipeline::main()
}
