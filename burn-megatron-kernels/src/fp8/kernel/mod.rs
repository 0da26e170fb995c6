//! Shared code of the CubeCL kernels for FP8.

mod code;
#[cfg(test)]
mod tests;
pub(crate) mod tile;

pub(crate) use code::{
    decode, e8m0_decode, e8m0_encode, e8m0_factors, e8m0_of_amax, encode, encode_word,
};
