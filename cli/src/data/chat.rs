//! The `[data.chat]` table of a recipe: conversations to fine-tune on.

use std::path::PathBuf;
use std::sync::Arc;

use burn_megatron_data::Dataset;
use burn_megatron_data::chat::{
    ChatData, ChatDataConfig, HeldOutExamples, LongExamples, TrainedTokens,
};
use burn_megatron_data::tokenizer::Tokenizer;
use burn_megatron_data::tokenizer::chat::ChatTemplate;
use chrono::NaiveDate;
use indicatif::ProgressBar;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::terminal::bar_style;

/// The default fraction of conversations that is held out.
const HELD_OUT: f64 = 0.1;

/// Conversations for fine-tuning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ChatConfig {
    /// JSON Lines files with conversations, or folders that contain .jsonl files.
    #[schemars(extend("value" = "PATH,.."))]
    pub files: Vec<PathBuf>,
    /// The fraction of conversations that is held out for evaluation. The default is 0.1.
    pub held_out: Option<f64>,
    /// JSON Lines files with held-out conversations, instead of a fraction of `files` (`held_out`).
    pub held_out_files: Vec<PathBuf>,
    /// The file with the chat template. The default is the chat template of the tokenizer.
    #[schemars(extend("value" = "PATH"))]
    pub template: Option<PathBuf>,
    /// The date that the chat template inserts, such as 2025-01-31. By default, there is no date.
    pub date: Option<String>,
    /// The tokens that contribute to the loss.
    pub loss: TrainedTokens,
    /// The handling of conversations that are longer than the sequence length.
    pub long: LongExamples,
    /// Whether several conversations are packed into one training sample. Tokens do not attend to other conversations.
    pub packing: bool,
}

impl Default for ChatConfig {
    fn default() -> Self {
        Self {
            files: vec![],
            held_out: None,
            held_out_files: vec![],
            template: None,
            date: None,
            loss: TrainedTokens::default(),
            long: LongExamples::default(),
            packing: true,
        }
    }
}

impl ChatConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// Returns an error if there are no files, if settings conflict with each other, or if the date is invalid.
    pub fn check(&self) -> Result<(), Error> {
        if self.files.is_empty() {
            return Err(
                "data.chat.files is empty: expected files of JSON lines, as in [\"train.jsonl\"]"
                    .into(),
            );
        }
        if self.held_out.is_some() && !self.held_out_files.is_empty() {
            return Err("data.chat.held_out (a share) conflicts with data.chat.held_out_files: remove one of \
                        them".into());
        }
        self.date().map(drop)
    }

    fn date(&self) -> Result<Option<NaiveDate>, Error> {
        let parse = |date: &String| {
            let parsed = NaiveDate::parse_from_str(date, "%Y-%m-%d");
            parsed.map_err(|_| {
                format!("invalid data.chat.date = {date:?}: expected a date, as in \"2025-01-31\"")
            })
        };
        Ok(self.date.as_ref().map(parse).transpose()?)
    }

    /// Opens the conversations for samples of `seq` tokens, and shows the progress on standard error.
    pub fn open(&self, tokenizer: &Tokenizer, seq: usize) -> Result<Arc<dyn Dataset>, Error> {
        let date = self.date()?;
        let template = match &self.template {
            Some(file) => Some(ChatTemplate::read(file, tokenizer, date)?),
            None => ChatTemplate::of(tokenizer, date)?,
        };
        let held_out = if self.held_out_files.is_empty() {
            HeldOutExamples::Share(self.held_out.unwrap_or(HELD_OUT))
        } else {
            HeldOutExamples::Files(self.held_out_files.clone())
        };
        let config = ChatDataConfig {
            files: self.files.clone(),
            held_out,
            loss: self.loss,
            long: self.long,
            packing: self.packing,
            seq,
        };
        let style = "conversations  {bytes} read, {bytes_per_sec}";
        let bar = ProgressBar::no_length().with_style(bar_style(style));
        let data = ChatData::open(config, tokenizer, template.as_ref(), &mut |bytes| {
            bar.inc(bytes)
        });
        bar.finish_and_clear();
        Ok(Arc::new(data?))
    }

    /// Clears the paths.
    pub fn clear_paths(&mut self) {
        self.files = vec![];
        self.template = self.template.take().map(|_| "template".into());
        self.held_out_files
            .iter_mut()
            .for_each(|file| *file = PathBuf::new());
    }
}
