//! Reads and writes Hugging Face models: `config.json` and safetensors.
//!
//! [`HfFolder`] is a [source of tensors](burn_megatron::checkpoint::TensorSource): a model with any parallel layout can
//! load it without conversion. [`export`] writes a model from any source as a folder that `transformers` can load. An
//! [`HfFamily`] maps `config.json` and the names of tensors to a model. [`ModelFamily`] contains the families of
//! [`TransformerConfig`](crate::TransformerConfig). Implement `HfFamily` to support families of other models. [`peft`]
//! reads and writes LoRA adapters in the format of the `peft` library.
//!
//! ```no_run
//! use burn_megatron_models::hf::HfFolder;
//!
//! let folder = HfFolder::open("Llama-3.1-8B")?;
//! println!("{:?}", folder.config().model);
//! # Ok::<(), burn_megatron_models::hf::HfError>(())
//! ```

mod config;
mod convert;
mod error;
mod export;
mod family;
mod folder;
mod interleave;
mod mapping;
pub mod peft;
mod shard;
mod staged_folder;
pub(crate) mod stored;
#[cfg(test)]
mod tests;
mod transpose;

pub use crate::families::ModelFamily;
pub use config::{ConfigKeys, HfConfig, SpecialTokenIds};
pub(crate) use convert::objects_for;
pub use convert::{export_config, export_config_of_run, import, stored_hf_files};
pub use error::{HfConfigError, HfError};
pub use export::{ExportOptions, ExportSummary, companion_files, export};
pub use family::{ClassDefaults, HfFamily, HfNames};
pub use folder::{HfFolder, is_hf_folder, model_type};
pub use mapping::{WeightEncoding, WeightMapping};
pub use shard::ShardIndex;
