//! The parts of the command that `burn-megatron-bench` uses. They are not a public API and may change.

pub use crate::cli::LogArgs;
pub use crate::command_line::run_program;
pub use crate::data_parallel::precision;
pub use crate::error::Error;
pub use crate::family::{Families, Model};
pub use crate::gemm_tuning::tune;
pub use crate::kernel_cases::{Direction, Inputs, KernelBenchmark, Shape, heads, subjects, work};
pub use crate::numbers::{at_least_one, count};
pub use crate::plan::source::RecipeModel;
pub use crate::preprocess::args::PreprocessArgs;
pub use crate::preprocess::preprocess;
pub use crate::ranks::{RankArgs, RankSetup, set_up};
pub use crate::recipe::merge::RecipeLayers;
pub use crate::recipe::{DEFAULT_RECIPE, Recipe};
pub use crate::set::SetArgs;
pub use crate::settings::SettingFlags;
pub use crate::stdio::write;
pub use crate::terminal::{MAX_COLUMNS, width as terminal_width, wrapped};
pub use crate::timed_steps::{NamedModel, RandomTokens, TimedSteps, run, run_in, set_steps};
pub use crate::timing::{TimingConfig, Work, median, time_interleaved};
