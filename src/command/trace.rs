//! Reads a trace: a recorded allocation history, as plain text or gzip (told apart by the first
//! bytes, never by the name).
//!
//! The first line is a `#` comment. Then one event a line, in order: `a ID SIZE STREAM` allocates
//! SIZE bytes on stream number STREAM, `f ID` frees. Ids count up from 1; what is never freed is
//! live at the end.
//!
//! A file is either read to its end and consistent, or refused with one line that says what is wrong and what
//! is allowed. Reading takes memory in proportion to the events, whatever is in the file: the length of a
//! line is limited, also inside gzip.

use flate2::bufread::GzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// The longest line that is read. A recorder's comment line is the longest there is.
const LINE_BYTES: usize = 4096;

/// The largest size, and the most that may be live at once: more than any GPU's memory, and small
/// enough that no sum of sizes overflows.
const LARGEST_BYTES: u64 = 1 << 46;

/// Sizes count towards the peak rounded up to this, the unit in which PyTorch counts them.
const UNIT_BYTES: u64 = 512;

/// How much of a wrong line is shown.
const SHOWN_BYTES: usize = 32;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// One allocation, or (with size 0) one free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The bytes to allocate, or 0 to free.
    pub size: u64,
    /// Which block; ids count up from 1.
    pub id: u32,
    /// Where the block's stream stands in [`Trace::streams`].
    pub stream: u16,
}

const _: () = assert!(size_of::<Event>() == 16);

/// A whole trace, known to be consistent.
#[derive(Debug, Default)]
pub struct Trace {
    /// At least one, in the file's order.
    pub events: Vec<Event>,
    /// How many of the events allocate; the ids are 1 to this.
    pub allocations: u32,
    /// The stream numbers in use, in the order of their first use.
    pub streams: Vec<u16>,
    /// The most bytes live at once, each size rounded up to 512.
    pub peak_live_bytes: u64,
}

/// Why a file is not a trace, and the line of the mistake, if it is on a line.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Counted from 1.
    line: Option<u64>,
    /// What is wrong and what is allowed, on one line.
    message: String,
}

impl Refusal {
    fn new(message: impl Into<String>) -> Self {
        Self {
            line: None,
            message: message.into(),
        }
    }

    /// The message as printed: `FILE:LINE: message`.
    pub fn about(&self, path: &Path) -> String {
        let line = self.line.map(|line| format!(":{line}")).unwrap_or_default();
        format!(
            "{}{line}: {}",
            printable(&path.to_string_lossy()),
            self.message
        )
    }
}

/// `text` on one line: a file's name may have line breaks in it.
pub fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let (plain, escaped) = if c.is_control() {
                (None, Some(c.escape_default()))
            } else {
                (Some(c), None)
            };
            plain.into_iter().chain(escaped.into_iter().flatten())
        })
        .collect()
}

/// Reads the trace in the file at `path`.
pub fn read(path: &Path) -> Result<Trace, Refusal> {
    let plain = |error: io::Error| match error.kind() {
        io::ErrorKind::IsADirectory => {
            Refusal::new("this is a directory; a trace is a file, gzip or plain text")
        }
        _ => Refusal::new(format!("can't be read: {error}")),
    };
    let mut file = BufReader::with_capacity(1 << 16, File::open(path).map_err(plain)?);
    let start = file.fill_buf().map_err(plain)?;
    if start.is_empty() {
        return Err(Refusal::new(
            "the file is empty; a trace starts with a # comment line",
        ));
    }
    if start.starts_with(&GZIP_MAGIC) {
        parse(
            BufReader::with_capacity(1 << 16, Gunzip::new(file)),
            u32::MAX,
        )
    } else {
        parse(file, u32::MAX)
    }
}

/// Reads the text of a trace of at most `most_events` events.
fn parse(mut text: impl BufRead, most_events: u32) -> Result<Trace, Refusal> {
    let mut line = Vec::with_capacity(LINE_BYTES + 1);
    let mut reading = Reading {
        most_events,
        ..Reading::default()
    };
    for number in 1.. {
        let result = match next_line(&mut text, &mut line) {
            Ok(false) => break,
            Ok(true) if number == 1 => comment(&line),
            Ok(true) => ended(&line).and_then(|event| reading.event(event)),
            Err(refusal) => Err(refusal),
        };
        result.map_err(|refusal| Refusal {
            line: Some(number),
            ..refusal
        })?;
    }
    if reading.trace.events.is_empty() {
        return Err(Refusal::new(
            "there are no events in it; `a ID SIZE STREAM` and `f ID` lines follow the # line",
        ));
    }
    Ok(reading.trace)
}

/// Fills `line` with the next line and its line break; false at the end of the text.
fn next_line(text: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool, Refusal> {
    line.clear();
    let mut bounded = text.take(LINE_BYTES as u64 + 1);
    bounded
        .read_until(b'\n', line)
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Refusal::new("the gzip data ends too early; the file is cut off")
            }
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
                Refusal::new(format!("the gzip data is damaged: {error}"))
            }
            _ => Refusal::new(format!("can't be read: {error}")),
        })?;
    Ok(!line.is_empty())
}

/// The line without its line break, which has to be there: a line cut off in the middle of a number
/// would otherwise pass for another number.
fn ended(line: &[u8]) -> Result<&[u8], Refusal> {
    match line.strip_suffix(b"\n") {
        Some(line) => Ok(line),
        None if line.len() > LINE_BYTES => Err(Refusal::new(format!(
            "the line is too long; at most {LINE_BYTES} bytes"
        ))),
        None => Err(Refusal::new(
            "the line has no line break at its end; the file is cut off",
        )),
    }
}

/// Checks the first line.
fn comment(line: &[u8]) -> Result<(), Refusal> {
    if !line.starts_with(b"#") {
        return Err(Refusal::new(format!(
            "this is not a trace: it starts with '{}'; a trace starts with a # comment line",
            shown(line)
        )));
    }
    ended(line).map(drop)
}

/// The start of `bytes` for a message, escaped.
fn shown(bytes: &[u8]) -> String {
    let end = bytes
        .iter()
        .position(|&byte| byte == b'\n')
        .unwrap_or(bytes.len());
    let cut = if end > SHOWN_BYTES { "…" } else { "" };
    format!("{}{cut}", bytes[..end.min(SHOWN_BYTES)].escape_ascii())
}

/// A trace while it is read.
#[derive(Default)]
struct Reading {
    trace: Trace,
    most_events: u32,
    /// By id less one: the bytes that the block counts for, 0 once it is freed.
    live: Vec<(u64, u16)>,
    live_bytes: u64,
    /// By stream number: where it stands in [`Trace::streams`], plus one.
    stream_places: Vec<u32>,
}

impl Reading {
    fn event(&mut self, line: &[u8]) -> Result<(), Refusal> {
        if self.trace.events.len() >= self.most_events as usize {
            let most = self.most_events;
            return Err(Refusal::new(format!(
                "one event too many; a trace has at most {most}"
            )));
        }
        let event = match line.split_at_checked(2) {
            Some((b"a ", rest)) => {
                numbers(rest).map(|[id, size, stream]| self.allocate(id, size, stream))
            }
            Some((b"f ", rest)) => numbers(rest).map(|[id]| self.free(id)),
            _ => None,
        };
        let event = event.unwrap_or_else(|| {
            let shown = shown(line);
            Err(Refusal::new(format!(
                "'{shown}' is neither `a ID SIZE STREAM` nor `f ID`, in decimals"
            )))
        })?;
        self.trace.events.push(event);
        Ok(())
    }

    fn allocate(&mut self, id: u64, size: u64, stream: u64) -> Result<Event, Refusal> {
        let due = self.live.len() as u64 + 1;
        if id != due {
            return Err(Refusal::new(format!(
                "id {id} comes where {due} is due; ids count up from 1"
            )));
        }
        if size == 0 || size > LARGEST_BYTES {
            return Err(Refusal::new(format!(
                "size {size}; a size is 1 to 2^46 bytes"
            )));
        }
        let stream = u16::try_from(stream)
            .map_err(|_| Refusal::new(format!("stream {stream}; a stream number is 0 to 65535")))?;
        let counted = size.next_multiple_of(UNIT_BYTES);
        self.live_bytes += counted;
        if self.live_bytes > LARGEST_BYTES {
            let live = self.live_bytes;
            return Err(Refusal::new(format!(
                "{live} bytes are live; at most 2^46 may be"
            )));
        }
        let stream = self.stream_place(stream);
        self.live.push((counted, stream));
        self.trace.allocations += 1;
        self.trace.peak_live_bytes = self.trace.peak_live_bytes.max(self.live_bytes);
        Ok(Event {
            size,
            id: self.trace.allocations,
            stream,
        })
    }

    fn free(&mut self, id: u64) -> Result<Event, Refusal> {
        let place = usize::try_from(id).ok().and_then(|id| id.checked_sub(1));
        let Some((counted, stream)) = place.and_then(|place| self.live.get_mut(place)) else {
            return Err(Refusal::new(format!(
                "id {id} is freed but was never allocated; a free names a live id"
            )));
        };
        if *counted == 0 {
            return Err(Refusal::new(format!(
                "id {id} is freed twice; a free names a live id"
            )));
        }
        self.live_bytes -= std::mem::take(counted);
        // The id is at most the number of allocations, a `u32`.
        Ok(Event {
            size: 0,
            id: id as u32,
            stream: *stream,
        })
    }

    fn stream_place(&mut self, stream: u16) -> u16 {
        let places = &mut self.stream_places;
        if places.len() <= usize::from(stream) {
            places.resize(usize::from(stream) + 1, 0);
        }
        let place = &mut places[usize::from(stream)];
        if *place == 0 {
            self.trace.streams.push(stream);
            *place = self.trace.streams.len() as u32;
        }
        // There are 65536 stream numbers, so the last place is 65535.
        (*place - 1) as u16
    }
}

/// Exactly `N` numbers with one space between them.
fn numbers<const N: usize>(text: &[u8]) -> Option<[u64; N]> {
    let mut fields = text.split(|&byte| byte == b' ').map(number);
    let mut numbers = [0; N];
    for number in &mut numbers {
        *number = fields.next()??;
    }
    fields.next().is_none().then_some(numbers)
}

/// A whole number in decimal digits, with no sign. One beyond `u64` comes back as the largest, which
/// every range check refuses.
fn number(field: &[u8]) -> Option<u64> {
    if field.is_empty() {
        return None;
    }
    field.iter().try_fold(0_u64, |number, &byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        Some(number.saturating_mul(10).saturating_add(digit))
    })
}

/// The text inside gzip data of one or more members, with nothing but members in the file.
struct Gunzip<R> {
    /// None after the last member.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Gunzip<R> {
    fn new(file: R) -> Self {
        Self {
            member: Some(GzDecoder::new(file)),
        }
    }
}

impl<R: BufRead> Read for Gunzip<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(into)?;
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            let Some(mut file) = self.member.take().map(GzDecoder::into_inner) else {
                break;
            };
            match file.fill_buf()? {
                [] => break,
                rest if rest[0] == GZIP_MAGIC[0] => self.member = Some(GzDecoder::new(file)),
                _ => {
                    let message = "something that is not gzip follows it";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read() {
        let text = "# by hand\na 1 1 7\na 2 513 0\nf 1\na 3 1536 7\nf 2\n";
        let trace = parse(text.as_bytes(), u32::MAX).unwrap();
        let event = |id, size, stream| Event { size, id, stream };
        assert_eq!(
            trace.events,
            [
                event(1, 1, 0),
                event(2, 513, 1),
                event(1, 0, 0),
                event(3, 1536, 0),
                event(2, 0, 1)
            ]
        );
        assert_eq!((trace.allocations, &trace.streams[..]), (3, &[7, 0][..]));
        assert_eq!(trace.peak_live_bytes, 1024 + 1536);
    }

    #[test]
    fn the_number_of_events_is_bounded() {
        let text = "# by hand\na 1 1 0\nf 1\n";
        assert!(parse(text.as_bytes(), 2).is_ok());
        let refusal = parse(text.as_bytes(), 1).unwrap_err();
        assert_eq!(
            refusal.about(Path::new("t")).to_string(),
            "t:3: one event too many; a trace has at most 1"
        );
    }

    #[test]
    fn every_stream_number_has_a_place() {
        let mut text = String::from("#\n");
        for stream in (0..=65535).rev() {
            text += &format!("a {} 512 {stream}\n", 65536 - stream);
        }
        let trace = parse(text.as_bytes(), u32::MAX).unwrap();
        assert_eq!(trace.streams.len(), 65536);
        assert!(
            trace
                .events
                .iter()
                .enumerate()
                .all(|(place, event)| usize::from(event.stream) == place)
        );
    }
}
