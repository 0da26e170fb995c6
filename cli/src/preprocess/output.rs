//! The output files, which are renamed to their final names once all of them are complete.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::check_output;
use burn_megatron_data::indexed::{IndexedDatasetBuilder, TokenType, bin_path, idx_path};
use burn_megatron_data::tokenizer::TokenFileInfo;

use super::error::PreprocessError;
use super::work::TokenizedDocuments;
use crate::documents::{Input, InputError};

/// Token files with their metadata.
pub struct TokenFileOutput {
    prefix: PathBuf,
    writer: IndexedDatasetBuilder,
    info: TokenFileInfo,
    /// The number of documents without tokens.
    pub empty: u64,
}

impl TokenFileOutput {
    /// Creates the files of this prefix. `info` is their metadata.
    ///
    /// # Errors
    /// Returns [`PreprocessError::Exists`] if a file exists and `overwrite` is false, and
    /// [`PreprocessError::InputIsOutput`] if a file is also an input. Returns [`PreprocessError::Indexed`] if the
    /// files cannot be written.
    pub fn create(
        prefix: &Path,
        info: TokenFileInfo,
        inputs: &[Input],
        overwrite: bool,
    ) -> Result<Self, PreprocessError> {
        check_output(prefix, &[])?;
        for path in paths(prefix) {
            if path.exists() && !overwrite {
                return Err(PreprocessError::Exists(path));
            }
            let same = |input: &Path| match (input.canonicalize(), path.canonicalize()) {
                (Ok(input), Ok(path)) => input == path,
                _ => false,
            };
            let mut inputs = inputs.iter().filter_map(|input| input.path.as_deref());
            let tokenizer = info.tokenizer_path.as_deref().map(Path::new);
            let is_tokenizer = |path: &Path| same(path) || same(&path.join("tokenizer.json"));
            if inputs.any(same) || tokenizer.is_some_and(is_tokenizer) {
                return Err(PreprocessError::InputIsOutput(path));
            }
        }
        if let Some(folder) = prefix
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
        {
            fs::create_dir_all(folder)
                .map_err(|source| InputError::io("create", folder, source))?;
        }
        // Without a known vocabulary, any token id can occur.
        let vocabulary = info.vocabulary.unwrap_or(usize::MAX);
        let token_type = TokenType::for_vocabulary(vocabulary);
        Ok(Self {
            prefix: prefix.to_path_buf(),
            writer: if overwrite {
                IndexedDatasetBuilder::replace(prefix, token_type)?
            } else {
                IndexedDatasetBuilder::create(prefix, token_type)?
            },
            info,
            empty: 0,
        })
    }

    /// Writes documents.
    ///
    /// # Errors
    /// Returns [`PreprocessError::Indexed`] if writing fails.
    pub fn write(&mut self, documents: &TokenizedDocuments) -> Result<(), PreprocessError> {
        self.empty += documents.empty;
        for (tokens, bytes) in &documents.documents {
            self.writer.document(tokens)?;
            self.info.documents += 1;
            self.info.tokens += tokens.len() as u64;
            self.info.bytes += *bytes as u64;
        }
        Ok(())
    }

    /// Returns the metadata of the documents that were written so far.
    pub fn info(&self) -> &TokenFileInfo {
        &self.info
    }

    /// Returns the path of the files without their extensions.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Renames the files to their final names, the index last.
    ///
    /// # Errors
    /// Returns [`PreprocessError::Indexed`] or [`PreprocessError::Input`] if writing fails.
    pub fn finish(self) -> Result<(), PreprocessError> {
        let path = TokenFileInfo::path(&self.prefix);
        let about = self
            .info
            .to_bytes()
            .map_err(|error| InputError::io("write", &path, error.into()))?;
        self.writer.finish_beside(&path, &about)?;
        Ok(())
    }
}

fn paths(prefix: &Path) -> [PathBuf; 3] {
    [
        bin_path(prefix),
        idx_path(prefix),
        TokenFileInfo::path(prefix),
    ]
}
