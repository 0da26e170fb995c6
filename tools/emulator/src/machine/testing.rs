//! Runs a few lines of PTX with a word of memory for each thread.

use std::collections::HashMap;

use super::{Counts, Failure, Options};
use crate::lower::lower;
use crate::ptx::parse;
use crate::testing::{kernel, run_with};

/// The first instructions of a thread of a one-dimensional block. `%r0` is the thread number, and `%d1` is the
/// address of the thread's 32-bit word in the buffer.
const OWN: &str = "mov.u32 %r0, %tid.x;\nmul.wide.u32 %d0, %r0, 4;\nadd.s64 %d1, %data, %d0;\n";

/// Runs `body` behind [`OWN`] with one block of `threads` threads. The buffer has a word for each thread, initially
/// zero.
pub(crate) fn words(body: &str, threads: u32) -> Result<Vec<u32>, Box<Failure>> {
    words_with(body, 1, threads, Options::default()).map(|(words, _)| words)
}

/// Runs like [`words`], with several blocks on the same words, and with options.
pub(crate) fn words_with(
    body: &str,
    blocks: u32,
    threads: u32,
    options: Options,
) -> Result<(Vec<u32>, Counts), Box<Failure>> {
    let program = kernel(&format!("{OWN}{body}"));
    let mut bytes = vec![0; 4 * threads as usize];
    let block = [threads, 1, 1];
    let counts = run_with(&program, [blocks, 1, 1], block, &mut bytes, options)?;
    let words = bytes.chunks_exact(4);
    let words = words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
    Ok((words.collect(), counts))
}

/// Returns the reason why an instruction with the registers of [`kernel`] is refused.
pub(crate) fn refused(instruction: &str) -> Option<String> {
    let text = format!(
        ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry tested(.param .u64 data)\n{{\n\
         .reg .pred %p<9>;\n.reg .b32 %r<9>;\n.reg .f32 %f<9>;\n.reg .b64 %d<9>;\n.reg .b64 %data;\n\
         {instruction}\n}}\n"
    );
    let module = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let lowered = lower(&module, &module.kernels[0], &HashMap::new());
    lowered.err().map(|error| error.what)
}
