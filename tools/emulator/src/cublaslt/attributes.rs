//! The attributes of descriptions, by their numbers in `cublasLt.h`.

use super::{Refusal, invalid};

/// An attribute: its number, its size in bytes, and its initial value.
#[derive(Debug)]
pub(super) struct Attribute {
    number: u32,
    bytes: usize,
    default: u64,
}

/// The attributes of one description.
#[derive(Clone, Debug)]
pub(super) struct Attributes {
    table: &'static [Attribute],
    values: Vec<u64>,
}

const fn int(number: u32, default: i32) -> Attribute {
    Attribute {
        number,
        bytes: 4,
        default: default as u32 as u64,
    }
}

const fn long(number: u32, default: u64) -> Attribute {
    Attribute {
        number,
        bytes: 8,
        default,
    }
}

const fn byte(number: u32) -> Attribute {
    Attribute {
        number,
        bytes: 1,
        default: 0,
    }
}

impl Attributes {
    pub(super) fn new(table: &'static [Attribute]) -> Self {
        let values = table.iter().map(|attribute| attribute.default).collect();
        Self { table, values }
    }

    fn place(&self, number: u32) -> Option<usize> {
        let is = |attribute: &Attribute| attribute.number == number;
        self.table.iter().position(is)
    }

    /// Returns the value, or 0 for an attribute that is not in the table.
    pub(super) fn get(&self, number: u32) -> u64 {
        self.place(number).map_or(0, |place| self.values[place])
    }

    pub(super) fn int(&self, number: u32) -> i32 {
        self.get(number) as i32
    }

    /// Sets an attribute that is in the table. Used by the constructors.
    pub(super) fn with(mut self, number: u32, value: u64) -> Self {
        if let Some(place) = self.place(number) {
            self.values[place] = value;
        }
        self
    }

    /// Sets an attribute from its bytes in C.
    pub(super) fn set(&mut self, number: u32, value: &[u8]) -> Result<(), Refusal> {
        let place = self.known(number)?;
        let bytes = self.table[place].bytes;
        if value.len() != bytes {
            return Err(invalid(format!(
                "attribute {number} has {bytes} bytes, not {}",
                value.len()
            )));
        }
        let mut whole = [0; 8];
        whole[..bytes].copy_from_slice(value);
        self.values[place] = u64::from_le_bytes(whole);
        Ok(())
    }

    /// Returns the bytes of an attribute in C.
    pub(super) fn bytes(&self, number: u32) -> Result<Vec<u8>, Refusal> {
        let place = self.known(number)?;
        let whole = self.values[place].to_le_bytes();
        Ok(whole[..self.table[place].bytes].to_vec())
    }

    fn known(&self, number: u32) -> Result<usize, Refusal> {
        self.place(number)
            .ok_or_else(|| invalid(format!("unknown attribute {number}")))
    }
}

/// Attributes of a product: `cublasLtMatmulDescAttributes_t`.
pub(super) mod description {
    use super::{Attribute, byte, int, long};

    pub const COMPUTE_TYPE: u32 = 0;
    pub const SCALE_TYPE: u32 = 1;
    pub const POINTER_MODE: u32 = 2;
    pub const TRANSA: u32 = 3;
    pub const TRANSB: u32 = 4;
    pub const TRANSC: u32 = 5;
    pub const FILL_MODE: u32 = 6;
    pub const EPILOGUE: u32 = 7;
    pub const BIAS_POINTER: u32 = 8;
    pub const EPILOGUE_AUX_POINTER: u32 = 11;
    pub const EPILOGUE_AUX_LD: u32 = 12;
    pub const A_SCALE_POINTER: u32 = 17;
    pub const B_SCALE_POINTER: u32 = 18;
    pub const C_SCALE_POINTER: u32 = 19;
    pub const D_SCALE_POINTER: u32 = 20;
    pub const AMAX_D_POINTER: u32 = 21;
    pub const EPILOGUE_AUX_DATA_TYPE: u32 = 22;
    pub const EPILOGUE_AUX_SCALE_POINTER: u32 = 23;
    pub const EPILOGUE_AUX_AMAX_POINTER: u32 = 24;
    pub const FAST_ACCUM: u32 = 25;
    pub const BIAS_DATA_TYPE: u32 = 26;
    pub const A_SCALE_MODE: u32 = 31;
    pub const B_SCALE_MODE: u32 = 32;
    pub const C_SCALE_MODE: u32 = 33;
    pub const D_SCALE_MODE: u32 = 34;
    pub const D_OUT_SCALE_POINTER: u32 = 36;

    /// `CUBLAS_FILL_MODE_FULL`.
    pub const FULL: i32 = 2;

    pub static TABLE: &[Attribute] = &[
        int(COMPUTE_TYPE, 0),
        int(SCALE_TYPE, 0),
        int(POINTER_MODE, 0),
        int(TRANSA, 0),
        int(TRANSB, 0),
        int(TRANSC, 0),
        int(FILL_MODE, FULL),
        int(EPILOGUE, 1),
        long(BIAS_POINTER, 0),
        // The stride of a batch of biases. The emulator reads neither this attribute nor attributes 13 and 14.
        long(10, 0),
        long(EPILOGUE_AUX_POINTER, 0),
        long(EPILOGUE_AUX_LD, 0),
        long(13, 0),
        long(14, 0),
        // The number of multiprocessors to use.
        int(15, 0),
        long(A_SCALE_POINTER, 0),
        long(B_SCALE_POINTER, 0),
        long(C_SCALE_POINTER, 0),
        long(D_SCALE_POINTER, 0),
        long(AMAX_D_POINTER, 0),
        int(EPILOGUE_AUX_DATA_TYPE, -1),
        long(EPILOGUE_AUX_SCALE_POINTER, 0),
        long(EPILOGUE_AUX_AMAX_POINTER, 0),
        byte(FAST_ACCUM),
        int(BIAS_DATA_TYPE, -1),
        int(A_SCALE_MODE, 0),
        int(B_SCALE_MODE, 0),
        int(C_SCALE_MODE, 0),
        int(D_SCALE_MODE, 0),
        int(35, 0),
        long(D_OUT_SCALE_POINTER, 0),
        int(37, 0),
    ];
}

/// Attributes of a matrix: `cublasLtMatrixLayoutAttribute_t`.
pub(super) mod layout {
    use super::{Attribute, int, long};

    pub const TYPE: u32 = 0;
    pub const ORDER: u32 = 1;
    pub const ROWS: u32 = 2;
    pub const COLS: u32 = 3;
    pub const LD: u32 = 4;
    pub const BATCH_COUNT: u32 = 5;
    pub const PLANE_OFFSET: u32 = 7;
    pub const BATCH_MODE: u32 = 8;

    pub static TABLE: &[Attribute] = &[
        int(TYPE, 0),
        int(ORDER, 0),
        long(ROWS, 0),
        long(COLS, 0),
        long(LD, 0),
        int(BATCH_COUNT, 1),
        // The stride of batches.
        long(6, 0),
        long(PLANE_OFFSET, 0),
        int(BATCH_MODE, 0),
    ];
}

/// Attributes of a search for an algorithm: `cublasLtMatmulPreferenceAttributes_t`.
pub(super) mod preference {
    use super::{Attribute, int, long};

    pub const MAX_WORKSPACE_BYTES: u32 = 1;
    /// The minimum alignment of `A`. The next numbers are the minimum alignments of `B`, `C` and `D`.
    pub const MIN_ALIGNMENT_A_BYTES: u32 = 5;

    pub static TABLE: &[Attribute] = &[
        // The search mode and the mask of algorithms. The emulator ignores both.
        int(0, 0),
        long(MAX_WORKSPACE_BYTES, 0),
        int(3, -1),
        int(MIN_ALIGNMENT_A_BYTES, 256),
        int(6, 256),
        int(7, 256),
        int(8, 256),
        int(9, 0),
        long(12, u64::MAX),
    ];
}
