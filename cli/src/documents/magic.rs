//! Detects the kind of a file from its first bytes.

use super::table::TableFormat;

/// The number of bytes needed to detect the kind of a file.
pub const HEAD: u64 = 4096;

/// Kind of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FileKind {
    /// Text or unknown content.
    Text,
    /// Data compressed with gzip.
    Gzip,
    /// Data compressed with zstd.
    Zstd,
    /// Table of columns.
    Table(TableFormat),
    /// Other content that is not text.
    Binary(&'static BinaryFormat),
}

/// Binary file format.
#[derive(Debug, PartialEq)]
pub struct BinaryFormat {
    offset: usize,
    magic: &'static [u8],
    /// The name of the format, with an article.
    pub name: &'static str,
    advice: &'static str,
}

impl BinaryFormat {
    /// Returns advice for converting the file at `path` to text.
    pub fn advice(&self, path: &str) -> String {
        self.advice.replace("PATH", path)
    }
}

const fn binary(
    offset: usize,
    magic: &'static [u8],
    name: &'static str,
    advice: &'static str,
) -> BinaryFormat {
    BinaryFormat {
        offset,
        magic,
        name,
        advice,
    }
}

/// The advice for formats that no command can convert.
const NO_TEXT: &str = "leave it out";
const UNZIP: &str =
    "`unzip PATH -d FOLDER` unpacks it (`pandoc PATH -t plain -o text.txt`, if it is a .docx)";
const UTF_16: &str = "`iconv -f UTF-16 -t UTF-8 PATH > text.txt` converts it";
const TOKENS: &str = "give the PREFIX of PREFIX.bin and PREFIX.idx to train on tokens";
const WEIGHTS: &str = "--load reads weights";
const PICKLE: &str = "load it in Python, and write its texts as JSON lines";

static FORMATS: [BinaryFormat; 31] = [
    binary(0, b"PK\x03\x04", "a zip archive", UNZIP),
    binary(
        0,
        b"BZh",
        "compressed by bzip2",
        "`bunzip2 PATH` decompresses it",
    ),
    binary(
        0,
        b"\xfd7zXZ\0",
        "compressed by xz",
        "`unxz PATH` decompresses it",
    ),
    binary(
        0,
        b"\x04\"M\x18",
        "compressed by lz4",
        "`lz4 -d PATH` decompresses it",
    ),
    binary(
        0,
        b"7z\xbc\xaf\x27\x1c",
        "a 7z archive",
        "`7z x PATH` unpacks it",
    ),
    binary(
        0,
        b"Rar!\x1a\x07",
        "a rar archive",
        "`unrar x PATH` unpacks it",
    ),
    binary(
        257,
        b"ustar",
        "a tar archive",
        "`tar -xf PATH -C FOLDER` unpacks it",
    ),
    binary(
        0,
        b"%PDF-",
        "a PDF",
        "`pdftotext PATH text.txt` converts it",
    ),
    binary(
        0,
        b"\xd0\xcf\x11\xe0",
        "a document of Office",
        "`soffice --convert-to txt:Text PATH` converts it",
    ),
    binary(
        0,
        b"SQLite format 3\0",
        "a database of SQLite",
        "`sqlite3 PATH \"select json_object('text', COLUMN) from TABLE\" > texts.jsonl` converts it",
    ),
    binary(0, b"\xff\xfe", "text in UTF-16", UTF_16),
    binary(0, b"\xfe\xff", "text in UTF-16", UTF_16),
    binary(0, b"MMIDIDX\0", "the index of token files", TOKENS),
    binary(
        0,
        b"GGUF",
        "a file of weights (GGUF)",
        "--load reads Hugging Face folders of safetensors",
    ),
    binary(0, b"\x80\x02", "a Python pickle", PICKLE),
    binary(0, b"\x80\x03", "a Python pickle", PICKLE),
    binary(0, b"\x80\x04", "a Python pickle", PICKLE),
    binary(0, b"\x80\x05", "a Python pickle", PICKLE),
    binary(0, b"\x93NUMPY", "an array of NumPy", PICKLE),
    binary(0, b"\x89HDF", "a file of HDF5", PICKLE),
    binary(0, b"\x7fELF", "a program (ELF)", NO_TEXT),
    binary(0, b"MZ", "a program (PE)", NO_TEXT),
    binary(0, b"\xcf\xfa\xed\xfe", "a program (Mach-O)", NO_TEXT),
    binary(0, b"!<arch>\n", "an archive of object files", NO_TEXT),
    binary(0, b"\x89PNG", "an image (PNG)", NO_TEXT),
    binary(0, b"\xff\xd8\xff", "an image (JPEG)", NO_TEXT),
    binary(0, b"GIF8", "an image (GIF)", NO_TEXT),
    binary(0, b"II*\0", "an image (TIFF)", NO_TEXT),
    binary(0, b"MM\0*", "an image (TIFF)", NO_TEXT),
    binary(8, b"WEBP", "an image (WebP)", NO_TEXT),
    binary(8, b"WAVE", "a sound (WAV)", NO_TEXT),
];

const PDF: &[u8] = b"%PDF-";
static SAFETENSORS: BinaryFormat = binary(0, b"", "a file of weights (safetensors)", WEIGHTS);

/// Returns the kind of the file that begins with `head`, its first [`HEAD`] bytes or fewer.
pub fn kind(head: &[u8]) -> FileKind {
    // Text may begin with the letters of a magic number. It is recognized because it has no null bytes and is valid
    // UTF-8.
    if !is_binary(head) && !head.starts_with(PDF) {
        return FileKind::Text;
    }
    let is = |format: &&BinaryFormat| {
        let from = head.get(format.offset..);
        from.is_some_and(|from| from.starts_with(format.magic))
    };
    match head {
        [0x1f, 0x8b, ..] => FileKind::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => FileKind::Zstd,
        [b'P', b'A', b'R', b'1', ..] => FileKind::Table(TableFormat::Parquet),
        [b'A', b'R', b'R', b'O', b'W', b'1', ..] => FileKind::Table(TableFormat::ArrowFile),
        [0xff, 0xff, 0xff, 0xff, ..] => FileKind::Table(TableFormat::ArrowStream),
        _ if is_safetensors(head) => FileKind::Binary(&SAFETENSORS),
        _ => FORMATS
            .iter()
            .find(is)
            .map_or(FileKind::Text, FileKind::Binary),
    }
}

fn is_binary(head: &[u8]) -> bool {
    let is_text = match std::str::from_utf8(head) {
        Ok(_) => true,
        // The last character may be incomplete.
        Err(error) => error.error_len().is_none(),
    };
    !is_text || head.contains(&0)
}

/// Checks for the length of the header (little-endian, 8 bytes), followed by the header as a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    let length = head.first_chunk().copied().map(u64::from_le_bytes);
    length.is_some_and(|length| (2..1 << 32).contains(&length)) && head.get(8) == Some(&b'{')
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn text_is_not_taken_for_what_it_begins_with() {
        for text in [
            "MZ is a code",
            "GIF8",
            "PAR1 of the text",
            "BZh",
            "",
            "é\u{fffd}",
        ] {
            assert_eq!(kind(text.as_bytes()), FileKind::Text, "{text}");
        }
        assert_eq!(
            kind("日".repeat(9).as_bytes().split_at(10).0),
            FileKind::Text
        );
        let FileKind::Binary(format) = kind(b"%PDF-1.7\nplain") else {
            panic!("a PDF may begin with text");
        };
        assert_snapshot!(format.advice("a.pdf"), @"`pdftotext a.pdf text.txt` converts it");
    }

    #[test]
    fn what_is_not_text_is_told_by_its_first_bytes() {
        let name = |head: &[u8]| match kind(head) {
            FileKind::Binary(format) => format.name,
            kind => panic!("{kind:?}"),
        };
        let weights = [&40_u64.to_le_bytes()[..], b"{\"a\":{\"dtype\":\"F32\"}}"].concat();
        assert_snapshot!(name(&weights), @"a file of weights (safetensors)");
        assert_snapshot!(name(b"\x7fELF\x02\x01\x01\0"), @"a program (ELF)");
        assert_snapshot!(name(b"RIFF\x24\0\0\0WEBPVP8 "), @"an image (WebP)");
        let tar = [&b"name"[..], &[0; 253], b"ustar\0"].concat();
        assert_snapshot!(name(&tar), @"a tar archive");
        assert_snapshot!(name(b"\xff\xfea\0b\0"), @"text in UTF-16");
        let table = |head: &[u8]| match kind(head) {
            FileKind::Table(format) => format,
            kind => panic!("{kind:?}"),
        };
        assert_eq!(table(b"PAR1\x15\x04\x15\0"), TableFormat::Parquet);
        assert_eq!(table(b"ARROW1\0\0"), TableFormat::ArrowFile);
        assert_eq!(
            table(b"\xff\xff\xff\xff\x28\x01\0\0"),
            TableFormat::ArrowStream
        );
    }
}
