//! The program of the page "From one device to many". It trains the same model on the same data in each layout, and prints the
//! loss.
//!
//! ```text
//! cargo run --release -p burn-megatron-learner --example one_to_many -- --layout data
//! ```
//!
//! Without `--layout` it runs all of them.

mod data;
mod learner;
mod parallel;

use std::env;
use std::error::Error;

use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::optim::AdamWConfig;
use burn_megatron_learner::MegatronStrategy;

type AnyError = Box<dyn Error + Send + Sync>;

/// The layouts, in the order of the page.
pub const LAYOUTS: [&str; 5] = ["one-device", "data", "zero", "tensor", "pipeline"];

/// Trains the model in a layout and returns the last loss.
pub fn run(layout: &str) -> Result<f64, AnyError> {
    match layout {
        "one-device" => learner::train(None),
        "data" => learner::train(Some(MegatronStrategy::from_env_or_threads(2)?)),
        "zero" => {
            let strategy = MegatronStrategy::from_env_or_threads(2)?
                .optimizer(AdamWConfig::default())
                .zero_stage(ZeroStage::Parameters);
            learner::train(Some(strategy))
        }
        "tensor" => parallel::train(&ParallelConfig::new().with_tensor(2).with_data(2)),
        "pipeline" => parallel::train(&ParallelConfig::new().with_tensor(2).with_pipeline(2)),
        _ => {
            let layouts = LAYOUTS.join(", ");
            Err(format!("invalid --layout {layout:?}: expected one of {layouts}").into())
        }
    }
}

/// Trains the model in the layout of the command line, or in all of them.
pub fn main() -> Result<(), AnyError> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let layouts = match &arguments[..] {
        [] => LAYOUTS.to_vec(),
        [flag, layout] if flag == "--layout" => vec![&layout[..]],
        _ => return Err("expected --layout LAYOUT, or no arguments".into()),
    };
    for layout in layouts {
        println!("{layout}: loss {:.4}", run(layout)?);
    }
    Ok(())
}
