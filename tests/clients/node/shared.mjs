// What every client needs: where the server is, the models, a question, and a tool.
export const url = process.env.SERVER_URL;
export const key = process.env.SERVER_KEY;
export const account = process.env.SERVER_ACCOUNT;
export const chat = process.env.CHAT_MODEL;
export const embed = process.env.EMBED_MODEL;
export const rerank = process.env.RERANK_MODEL;
export const underAccount = `${url}/client/v4/accounts/${account}/ai`;
export const question = "What does math.sqrt do?";
export const weatherQuestion = "What is the weather in Paris?";
export const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
export const weather = { name: "get_weather", description: "Get the current weather of a city", parameters: city };
