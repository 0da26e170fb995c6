//! Integer arrays in NumPy's `.npy` format, in memory or mapped.

use std::fmt;
use std::io;
use std::path::Path;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use burn_megatron::regular_file;

/// The alignment of the data, in bytes.
const ALIGNMENT: usize = 64;

/// The integer type of the elements of an [`NpyArray`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NpyType {
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 64-bit integer.
    I64,
}

impl NpyType {
    /// Returns the NumPy name of the type.
    fn name(self) -> &'static str {
        match self {
            Self::I16 => "<i2",
            Self::I32 => "<i4",
            Self::U32 => "<u4",
            Self::I64 => "<i8",
        }
    }

    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::I16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }
}

/// A Rust integer type that an [`NpyArray`] can contain.
pub trait NpyInt: Copy {
    /// The NumPy type that corresponds to this Rust type.
    const TYPE: NpyType;

    /// Appends the bytes of the value to `bytes`, in little-endian order.
    fn append(self, bytes: &mut Vec<u8>);
}

macro_rules! ints {
    ($($int:ty = $kind:ident),*) => {$(
        impl NpyInt for $int {
            const TYPE: NpyType = NpyType::$kind;

            fn append(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}
ints!(i16 = I16, i32 = I32, u32 = U32, i64 = I64);

/// The storage of an array.
enum ArrayBytes {
    Memory(Vec<u8>),
    File(Mmap),
}

/// An integer array with one or two dimensions, in NumPy's `.npy` format.
pub struct NpyArray {
    int_type: NpyType,
    shape: Vec<usize>,
    /// The content of a `.npy` file.
    bytes: ArrayBytes,
    /// The offset of the data.
    start: usize,
}

impl NpyArray {
    /// Creates an array in memory from its values in row-major order.
    ///
    /// # Panics
    ///
    /// Panics if the product of `shape` is not equal to the number of values.
    pub fn new<T: NpyInt>(values: &[T], shape: &[usize]) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>(), "{shape:?}");
        let header = header(T::TYPE, shape);
        let start = header.len();
        let mut bytes = header;
        bytes.reserve_exact(values.len() * T::TYPE.size());
        values.iter().for_each(|value| value.append(&mut bytes));
        Self {
            int_type: T::TYPE,
            shape: shape.to_vec(),
            bytes: ArrayBytes::Memory(bytes),
            start,
        }
    }

    /// Maps a `.npy` file into memory. Returns `None` if the file has a different type or shape.
    ///
    /// # Errors
    ///
    /// Errors of the operating system.
    pub fn open(path: &Path, int_type: NpyType, shape: &[usize]) -> io::Result<Option<Self>> {
        let file = regular_file::open(path)?;
        // Safety: complete cache files are renamed into place, and not modified afterwards.
        let mapped = unsafe { Mmap::map(&file)? };
        let header = header(int_type, shape);
        let numbers = shape.iter().try_fold(1_usize, |x, y| x.checked_mul(*y));
        let size = numbers.and_then(|x| x.checked_mul(int_type.size())?.checked_add(header.len()));
        let fits = size == Some(mapped.len()) && mapped.starts_with(&header);
        Ok(fits.then(|| Self {
            int_type,
            shape: shape.to_vec(),
            bytes: ArrayBytes::File(mapped),
            start: header.len(),
        }))
    }

    /// Returns the element type of the array.
    pub fn int_type(&self) -> NpyType {
        self.int_type
    }

    /// Returns the shape of the array.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the element at a flat (row-major) index.
    ///
    /// # Panics
    ///
    /// Panics if the index is out of range.
    pub fn get(&self, place: usize) -> i64 {
        let start = self.start + place * self.int_type.size();
        let bytes = &self.file()[start..];
        match self.int_type {
            NpyType::I16 => i16::from_le_bytes(first(bytes)).into(),
            NpyType::I32 => i32::from_le_bytes(first(bytes)).into(),
            NpyType::U32 => u32::from_le_bytes(first(bytes)).into(),
            NpyType::I64 => i64::from_le_bytes(first(bytes)),
        }
    }

    /// Returns all elements in row-major order.
    pub fn iter(&self) -> impl Iterator<Item = i64> {
        (0..self.len()).map(|place| self.get(place))
    }

    /// Returns the array as the content of a `.npy` file.
    pub fn file(&self) -> &[u8] {
        match &self.bytes {
            ArrayBytes::Memory(bytes) => bytes,
            ArrayBytes::File(mapped) => mapped,
        }
    }
}

fn first<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut first = [0; N];
    first.copy_from_slice(&bytes[..N]);
    first
}

/// Returns the header, in version 1.0 of the format.
fn header(int_type: NpyType, shape: &[usize]) -> Vec<u8> {
    let sizes: String = shape.iter().map(|size| format!("{size}, ")).collect();
    let shape = match shape.len() {
        1 => sizes.trim_end(),
        _ => sizes.trim_end_matches(", "),
    };
    let name = int_type.name();
    let mut text = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({shape}), }}");
    let before = 10;
    let size = (before + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', size - before - text.len() - 1));
    text.push('\n');
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((text.len() as u16).to_le_bytes());
    header.extend(text.into_bytes());
    header
}

/// Shows the type and the shape, not the elements.
impl fmt::Debug for NpyArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Array({:?}, {:?})", self.int_type, self.shape)
    }
}
