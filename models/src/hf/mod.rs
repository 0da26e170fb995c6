//! Models of Hugging Face: `config.json` and safetensors, read and written.
//!
//! [`HfFolder`] is a [source of tensors](burn_megatron::checkpoint::TensorSource), so that any layout
//! loads it with no conversion, and [`export`] writes any source as a folder that `transformers` loads.
//! The [`Family`] is one of GPT-2, Llama, Mistral, Qwen 2 and Qwen 3.
//!
//! ```no_run
//! use burn_megatron_models::hf::HfFolder;
//!
//! let folder = HfFolder::open("Llama-3.1-8B")?;
//! println!("{:?}", folder.config().model);
//! # Ok::<(), burn_megatron_models::hf::HfError>(())
//! ```

mod config;
mod draft;
mod error;
mod exchange;
mod export;
mod folder;
mod names;
mod shard;
#[cfg(test)]
mod tests;
mod transpose;

pub use config::{Family, HfConfig, SpecialTokens};
pub use error::{HfConfigError, HfError};
pub use exchange::{exported_as, import, kept_files, model_of};
pub use export::{ExportOptions, Exported, companions, export};
pub use folder::{HfFolder, is_hf_folder};
pub use shard::ShardIndex;
