//! Draws the training data: `[data]`.

use std::fs;
use std::path::Path;

use super::{Draft, Feature};

/// The text that recipes read.
pub const TEXT: &str = "text.txt";
/// The token files that recipes read, without their extension.
pub const TOKENS: &str = "tokens";

/// Writes the text, and the documents for the token files of `preprocess`.
///
/// # Errors
/// Returns an error if the folder cannot be written.
pub fn write_text(folder: &Path, documents: &Path) -> std::io::Result<()> {
    let line = |number: usize| format!("fn number_{number}() -> usize {{ {} }}\n", number * number);
    let text: String = (0..200).map(line).collect();
    fs::write(folder.join(TEXT), &text)?;
    // Documents of 2 to 71 bytes: most rows of a packed sample contain several documents.
    let document = |number: usize| &text[number * 13..number * 13 + 2 + (number * 29) % 70];
    let lines: Vec<_> = (0..200)
        .map(|number| document(number).replace('\n', " "))
        .collect();
    fs::write(documents, lines.join("\n"))
}

/// Draws text, or token files for settings that need documents.
pub fn base(draft: &mut Draft<'_>) {
    let needs_documents = draft.is("parallel.context_split", "zigzag-per-document");
    if needs_documents || draft.random.once_in(4) {
        files(draft);
    } else {
        draft.set_text("data.path", TEXT);
    }
    if needs_documents {
        draft.set("data.packing", true);
    }
}

pub const FEATURES: &[Feature] = &[
    files,
    packing,
    packing,
    reset_attention,
    eod_mask_loss,
    tokenizer,
];

fn files(draft: &mut Draft<'_>) -> bool {
    draft.settings.remove("data.path");
    draft.settings.remove("data.tokenizer");
    draft.set("data.files", format_args!("[{TOKENS:?}]"));
    draft.set_text("data.split", "80,20,0")
}

fn packing(draft: &mut Draft<'_>) -> bool {
    if draft.has("data.reset_attention") || draft.has("train.sequence_warmup") {
        return false;
    }
    files(draft);
    draft.set("data.packing", true)
}

fn reset_attention(draft: &mut Draft<'_>) -> bool {
    if draft.has("data.packing") || draft.has("train.sequence_warmup") {
        return false;
    }
    files(draft);
    draft.set("data.reset_attention", true)
}

fn eod_mask_loss(draft: &mut Draft<'_>) -> bool {
    files(draft);
    draft.set("data.eod_mask_loss", true)
}

fn tokenizer(draft: &mut Draft<'_>) -> bool {
    draft.has("data.path") && draft.set_text("data.tokenizer", "bytes")
}
